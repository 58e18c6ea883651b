"""Key files of agents, with mode 0600 from the start: made, read and replaced."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from connectors.cli.shared.arguments import new_private_file, read_given
from trunkline_agent.errors import UsageError
from trunkline_agent.mcp.signing import checked_public_key, load_private_key, new_key_pair, public_pem

_LIMIT_BYTES: Final = 65_536
_PRIVATE: Final = b"PRIVATE KEY"


def new_key_file(path: Path, option: str) -> str:
    """Make a key pair, write the private key to the new file `path` (mode 0600), and return the public key.

    Both keys are in PEM. Raises UsageError if the file exists or cannot be written. The error's text names
    `option`, the command's option for the file.
    """
    private, public = new_key_pair()
    with new_private_file(path, option) as file:
        assert file is not None  # noqa: S101  there is a path
        file.write(private.decode("ascii"))
    return public


def public_key_in(path: Path) -> str:
    """Return the public key of a PEM file as PEM. If the file has a private key, its public half is returned.

    Raises UsageError if the file cannot be read, or has no RSA key of 2048 to 8192 bits.
    """
    pem = read_given(str(path), "the key", _LIMIT_BYTES)
    try:
        if _PRIVATE in pem:
            return public_pem(load_private_key(pem))
        return checked_public_key(pem.decode("utf-8").strip() + "\n")
    except ValueError as error:
        raise UsageError(f"{path} holds no key of an agent: {error}") from None


def private_key(path: Path) -> RSAPrivateKey:
    """Read the private key in the file `path`.

    Raises KeyFileError, a UsageError, if the file is missing, has no usable key or can be read by others.
    """
    from trunkline_agent.mcp.private_keys import AgentKey

    return AgentKey(path).current()


def successor_of(path: Path) -> str:
    """Return the public key, as PEM, that is to replace the key in the file `path` in a rotation.

    The private key is made here and written to a hidden file beside `path`. If an interrupted rotation has left
    such a file, its key is used. The file `path` does not change before `put_in_place`. Raises UsageError if
    the hidden file cannot be written.
    """
    draft = _draft(path)
    if draft.exists():
        with suppress(UsageError):
            return public_pem(private_key(draft))
        # The file is not complete, so its key was never registered.
        draft.unlink(missing_ok=True)
    return new_key_file(draft, "FILE")


def drop_successor(path: Path) -> None:
    """Delete the hidden file with the key that `successor_of` made for `path`, because the gateway refused it.

    A missing file is no error.
    """
    _draft(path).unlink(missing_ok=True)


def put_in_place(path: Path) -> None:
    """Replace the key in the file `path` by the one that `successor_of` made, in one step.

    When this returns, the new key is safe from a power cut. Raises OSError, such as FileNotFoundError if
    `successor_of` was not called; then the old key stays.
    """
    _draft(path).replace(path)
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.next")
