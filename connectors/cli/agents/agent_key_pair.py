"""Key files of agents as the command line makes, reads and replaces them: 0600 from the start."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from connectors.cli.shared.given_content import read_given
from schemas.errors import UsageError
from schemas.streams.agents.agent_signing import checked_public_key, load_private_key, new_key_pair, public_pem

_LIMIT_BYTES: Final = 65_536
_PRIVATE: Final = b"PRIVATE KEY"


def new_key_file(path: Path, option: str) -> str:
    """Make a pair; the private key is on the disk in a new file when this returns the public one.

    Raises UsageError that names `option` when the file is there already or cannot be written.
    """
    private, public = new_key_pair()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(private)
            file.flush()
            os.fsync(fd)
    except FileExistsError:
        raise UsageError(f"{option}: {path} is there already; it is not overwritten") from None
    except OSError as error:
        raise UsageError(f"{option}: cannot write {path}: {error.strerror}") from None
    return public


def public_key_in(path: Path) -> str:
    """The public key in a PEM file, which may be a private key's. Raises UsageError."""
    pem = read_given(str(path), "the key", _LIMIT_BYTES)
    try:
        if _PRIVATE in pem:
            return public_pem(load_private_key(pem))
        return checked_public_key(pem.decode("utf-8").strip() + "\n")
    except ValueError as error:
        raise UsageError(f"{path} holds no key of an agent: {error}") from None


def checked_key_file(path: Path) -> None:
    """Raise UsageError (KeyFileError) when there is no private key that is its owner's alone."""
    _private_key(path)


def successor_of(path: Path) -> str:
    """The public half of the key that is to follow: a new one, or that of a rotation that broke off."""
    draft = _draft(path)
    if draft.exists():
        with suppress(UsageError):
            return public_pem(_private_key(draft))
        # Not written to its end, so nobody was told of it.
        draft.unlink(missing_ok=True)
    return new_key_file(draft, "FILE")


def drop_successor(path: Path) -> None:
    """Forget it: it was refused."""
    _draft(path).unlink(missing_ok=True)


def put_in_place(path: Path) -> None:
    """Replace the key by its successor, in one step."""
    _draft(path).replace(path)
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


def _private_key(path: Path) -> RSAPrivateKey:
    # Imported here: with it comes all of the agent's client, which takes a second.
    from connectors.agent_client.signed_auth import AgentKey

    return AgentKey(path).current()


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.next")
