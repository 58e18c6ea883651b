"""An agent's private key: a file that its owner alone may read, read again when it has changed."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from schemas.errors import UsageError
from schemas.streams.agents.agent_signing import load_private_key

# No key is longer, and a file that never ends is not read.
_FILE_LIMIT: Final = 65536


class KeyFileError(UsageError):
    """The key file cannot be used. Says why, and shows nothing of what it holds."""


class AgentKey:
    """The key in a file. To rotate it, replace the file (`os.replace`): one that is written in place may be
    seen half written, and is refused for that moment.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._key: RSAPrivateKey | None = None

    def __repr__(self) -> str:
        return f"AgentKey({str(self._path)!r})"

    def current(self) -> RSAPrivateKey:
        """The key as the file has it now. Raises KeyFileError, also when it once could be read and now is gone
        or open to others: who takes a key away wants it to be used no more.
        """
        with self._lock:
            try:
                # A pipe in its place would have us wait for ever.
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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
            raise KeyFileError(f"the key file {self._path} is no file")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise KeyFileError(f"the key file {self._path} is open to others ({mode:04o}): chmod 600 it")
        seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if self._key is None or seen != self._seen:
            self._key = None
            try:
                self._key = load_private_key(os.read(fd, _FILE_LIMIT))
            except (OSError, ValueError) as error:
                raise KeyFileError(f"the key file {self._path} holds no key to sign with: {error}") from None
            self._seen = seen
        return self._key
