"""The private key of an agent, from a file or from the text of its credentials."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Final, Protocol

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from trunkline_agent.errors import UsageError
from trunkline_agent.mcp.signing import load_private_key
from trunkline_agent.private_files import PrivateFileError, check_private, open_private

# No key is longer. The limit also ends the reading of an endless file.
_FILE_LIMIT: Final = 65536


class KeyFileError(UsageError):
    """The file of the agent's private key cannot be used. The text says why, without the file's content."""


class AgentKey:
    """An agent's private key in a file that only its owner may read. Thread-safe.

    The file is read again when it has changed. To rotate the key, replace the file (`os.replace`). A file that
    is written in place may be read half written, and is refused at that moment.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._key: RSAPrivateKey | None = None

    def __repr__(self) -> str:
        return f"AgentKey({str(self._path)!r})"

    def current(self) -> RSAPrivateKey:
        """Return the key that is in the file now.

        Raises KeyFileError if the file is missing, is readable by others or has no valid key. This also holds
        for a file that was usable before, because the owner may have withdrawn the key.
        """
        with self._lock:
            try:
                fd = open_private(self._path)
            except PrivateFileError as error:
                raise KeyFileError(f"the key file {error}") from None
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else "no path"
                raise KeyFileError(f"cannot read the key file {self._path}: {why}") from None
            try:
                return self._read(fd)
            finally:
                os.close(fd)

    def _read(self, fd: int) -> RSAPrivateKey:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise KeyFileError(f"the key file {self._path} is not a regular file")
        try:
            check_private(self._path, found)
        except PrivateFileError as error:
            raise KeyFileError(f"the key file {error}") from None
        seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if self._key is None or seen != self._seen:
            self._key = None
            try:
                self._key = load_private_key(os.read(fd, _FILE_LIMIT))
            except (OSError, ValueError) as error:
                raise KeyFileError(f"the key file {self._path} holds no usable key: {error}") from None
            self._seen = seen
        return self._key


class KeyText:
    """An agent's private key in PEM, as the credentials have it. Thread-safe; `repr` does not show the key.

    Raises KeyFileError if the text is no usable key.
    """

    def __init__(self, pem: str) -> None:
        try:
            self._key = load_private_key(pem.encode("utf-8"))
        except ValueError as error:
            raise KeyFileError(f"the credentials hold no usable private key: {error}") from None

    def current(self) -> RSAPrivateKey:
        """Return the key."""
        return self._key


class KeySource(Protocol):
    """A source of an agent's private key: `AgentKey` or `KeyText`."""

    def current(self) -> RSAPrivateKey:
        """Return the key that is valid now. Raises KeyFileError if it cannot be used."""
        ...
