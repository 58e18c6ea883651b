"""The files of a queue: a session's folder, lock and messages (FQ-05, FQ-06, FQ-11), and the audit (FQ-10).

The files of a session are opened relative to its folder and never through a link, so no name leads out of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from trunkline_agent.queue.message_record import BODY_LIMIT, LINE_LIMIT, stamp, to_line
from trunkline_agent.queue.queue_errors import QueueError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MESSAGES, BODIES, CURSORS, LOCK = "messages.jsonl", "bodies", "cursors", ".lock"
PLAN = "expire.plan"
DELAYED = "delayed"
AUDIT = "audit.jsonl"
FILE_MODE, FOLDER_MODE = 0o600, 0o700
CHUNK_BYTES = 256 * 1024
FOLDER = os.O_RDONLY | os.O_DIRECTORY
# Non-blocking: a pipe in place of a file must not block the reader.
_READ = os.O_RDONLY | os.O_NONBLOCK
REWRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class OpenFile(int):
    """A file descriptor that is also a context manager, which closes it at the end."""

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self)


def open_fd(name: str, flags: int, folder: int | None = None) -> OpenFile:
    """Open a file or a folder, and return its descriptor, which the caller closes (`with`).

    Raises OSError, also for a symbolic link, and FileNotFoundError for a missing file.

    Args:
        name: The path, relative to `folder`.
        flags: The flags of `os.open`.
        folder: The descriptor of a folder; None for the current directory.
    """
    return OpenFile(os.open(name, flags | os.O_NOFOLLOW, FILE_MODE, dir_fd=folder))


class SessionFolder:
    """The open folder of a session, with its locks and files. Not thread-safe.

    Use it as a context manager, which at the end releases the locks and closes the folder.

    Args:
        root: The queue's folder.
        session: The name of the session.
        create: Whether to create missing folders. Otherwise a missing session raises FileNotFoundError.
    """

    def __init__(self, root: str, session: str, *, create: bool) -> None:
        self.path = f"{root}/sessions/{session}"
        try:
            self.fd = os.open(self.path, FOLDER)
        except FileNotFoundError:
            if not create:
                raise
            _make_folders(root, self.path)
            self.fd = os.open(self.path, FOLDER)
        self._lock_fd: int | None = None
        self._bodies_fd: int | None = None

    def __enter__(self) -> SessionFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock()
        os.close(self.fd)

    def lock(self) -> None:
        """Take the session's exclusive lock, and wait without a time limit while another process has it.

        `unlock`, or the end of the context or of the process, releases it.
        """
        while True:
            fd = open_fd(LOCK, os.O_RDWR | os.O_CREAT, self.fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                # If the file was deleted during the wait, other processes lock a new one.
                if os.fstat(fd).st_ino == os.stat(LOCK, dir_fd=self.fd, follow_symlinks=False).st_ino:
                    self._lock_fd = fd
                    return
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def hold_bodies(self) -> None:
        """Take the shared lock that keeps `Queue.expire` from deleting side-files which no line names yet.

        It waits while an `expire` deletes such files. A sender takes the lock before it writes a side-file, the
        file of one long body. `unlock`, or the end of the process, releases it.
        """
        if self._bodies_fd is None:
            self._bodies_fd = self.open_folder(BODIES)
            fcntl.flock(self._bodies_fd, fcntl.LOCK_SH)

    def unlock(self) -> None:
        """Release the locks of `lock` and `hold_bodies`, if they are taken.

        They are released explicitly, because a child forked by another thread may share the descriptors.
        """
        held = (self._lock_fd, self._bodies_fd)
        self._lock_fd = self._bodies_fd = None
        for fd in held:
            if fd is not None:
                fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)

    def has(self, name: str) -> bool:
        """Return whether the session's folder has a file with this name."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open_file(self, name: str, folder: str | None = None) -> OpenFile | None:
        """Open a file of the session for reading, and return its descriptor, or None if the file is missing.

        The caller closes the descriptor (`with`).

        Args:
            name: The file's name.
            folder: The name of the sub-folder of the session that the file is in; None for the session's folder
                itself.

        Raises:
            OSError: The file is a symbolic link or no regular file, or cannot be opened.
        """
        with OpenFile(os.dup(self.fd)) if folder is None else self.open_folder(folder) as parent:
            try:
                fd = open_fd(name, _READ, parent)
            except FileNotFoundError:
                return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return fd

    def open_folder(self, name: str) -> OpenFile:
        """Open a sub-folder of the session, and return its descriptor, which the caller closes (`with`).

        A missing sub-folder is created. Raises OSError if it cannot be opened or created, or is a symbolic
        link.
        """
        try:
            return open_fd(name, FOLDER, self.fd)
        except FileNotFoundError:
            _mkdir(name, self.fd)
            return open_fd(name, FOLDER, self.fd)

    def sync_path(self) -> None:
        """Sync the session's folder and all folders above it to the disk, to survive a power cut."""
        os.fsync(self.fd)
        folder = self.path
        while folder not in ("", "/"):
            folder = folder.rpartition("/")[0] or "/"
            try:
                with OpenFile(os.open(folder, FOLDER)) as fd:
                    os.fsync(fd)
            except PermissionError:  # we have not created a folder that we may not read
                return

    def write_body(self, name: str, body: bytes) -> None:
        """Write a new side-file with a message's body and sync it to the disk.

        An incomplete file is removed again. Until `unlock`, `Queue.expire` does not delete the file as unused.
        Raises OSError if the file exists or cannot be written.
        """
        self.hold_bodies()
        with self.open_folder(BODIES) as folder:
            with open_fd(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder) as fd:
                try:
                    write_all(fd, body)
                    os.fsync(fd)
                except BaseException:
                    os.unlink(name, dir_fd=folder)
                    raise
            os.fsync(folder)

    def read_body(self, name: str) -> tuple[str | None, str | None]:
        """Return the text of a side-file (a long body) as `(text, None)`, or `(None, reason)` if unreadable."""
        try:
            fd = self.open_file(name, BODIES)
            if fd is None:
                return None, "the side-file is missing"
            with fd:
                if os.fstat(fd).st_size > BODY_LIMIT:
                    return None, f"the side-file is longer than {BODY_LIMIT} bytes"
                # An empty body is never in a side-file.
                text = read_range(fd, 0, BODY_LIMIT).decode("utf-8")
                return (text, None) if text else (None, "the side-file is empty")
        except UnicodeDecodeError:
            return None, "the side-file is not UTF-8"
        except OSError as error:
            return None, f"the side-file cannot be read: {error.strerror}"

    def remove_bodies(self, names: list[str]) -> None:
        """Delete the side-files (files of long bodies) with these names. Skip those that cannot be deleted."""
        with self.open_folder(BODIES) as folder:
            for name in names:
                try:
                    os.unlink(name, dir_fd=folder)
                except (FileNotFoundError, IsADirectoryError, PermissionError):
                    continue


def append(fd: int, line: bytes) -> None:
    """Append `line` to an open file with one write. `line` must already end with a newline; none is added.

    The caller has the lock of the file. If the file's last line has no newline, the missing newline is written
    first. Such a line is from a writer that was killed, or that does not use the lock.

    Raises OSError, such as for a full disk, after the file was cut to its old length, and QueueError if that
    failed, too.
    """
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        line = b"\n" + line
    try:
        written = os.write(fd, line)
        if written < len(line):
            # A full disk writes what fits, and reports an error only for the next write.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        try:
            os.ftruncate(fd, size)
        except OSError as second:
            raise QueueError(
                f"a line was written in part and could not be removed: {second.strerror}. The next send "
                "completes it, and readers skip it."
            ) from error
        raise


def complete_lines(fd: int, start: int, end: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield each line between two offsets that ends with a newline, as its start, its end and its content.

    `fd` is the descriptor of a file. The end includes the newline, the content does not. The content is None
    for a line over 16 MiB, which is never in memory as a whole. It is also None for the rest of a line if
    `start` is within that line.
    """
    whole = start == 0 or os.pread(fd, 1, start - 1) == b"\n"
    line_start, offset, held, held_bytes = start, start, [], 0
    while offset < end:
        chunk = os.pread(fd, min(CHUNK_BYTES, end - offset), offset)
        if not chunk:
            return
        begin = 0
        while (newline := chunk.find(b"\n", begin)) >= 0:
            held.append(chunk[begin:newline])
            held_bytes += newline - begin
            line_end = offset + newline + 1
            yield line_start, line_end, b"".join(held) if whole and held_bytes <= LINE_LIMIT else None
            line_start, begin, held, held_bytes, whole = line_end, newline + 1, [], 0, True
        held_bytes += len(chunk) - begin
        held = [*held, chunk[begin:]] if held_bytes <= LINE_LIMIT else []
        offset += len(chunk)


def complete_lines_backward(fd: int, end: int) -> Iterator[bytes | None]:
    """Yield the lines before the offset `end` that end with a newline, the last one first.

    `fd` is the descriptor of the file. The newline is left out. A line over 16 MiB is yielded as None.
    """
    offset, held, held_bytes, is_tail = end, [], 0, True
    while offset > 0:
        size = min(CHUNK_BYTES, offset)
        chunk = os.pread(fd, size, offset - size)
        if len(chunk) < size:
            return
        offset -= size
        stop = size
        while (newline := chunk.rfind(b"\n", 0, stop)) >= 0:
            held.append(chunk[newline + 1 : stop])
            held_bytes += stop - newline - 1
            if not is_tail:
                yield b"".join(reversed(held)) if held_bytes <= LINE_LIMIT else None
            stop, held, held_bytes, is_tail = newline, [], 0, False
        held_bytes += stop
        held = [*held, chunk[:stop]] if held_bytes <= LINE_LIMIT and not is_tail else []
    if not is_tail:
        yield b"".join(reversed(held)) if held_bytes <= LINE_LIMIT else None


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` to the descriptor `fd`, with as many writes as necessary.

    Raises OSError, such as for a full disk; then a part of `data` may be written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_range(fd: int, start: int, limit: int) -> bytes:
    """Return the bytes of a file from the offset `start` on, at most `limit`; fewer where the file ends."""
    pieces: list[bytes] = []
    while limit > 0 and (piece := os.pread(fd, min(limit, CHUNK_BYTES), start)):
        pieces.append(piece)
        start += len(piece)
        limit -= len(piece)
    return b"".join(pieces)


def replace_file(folder: int, name: str, data: bytes) -> None:
    """Replace or create the small file `name` in one step and sync it to the disk.

    Readers see either the old or the new content, also after a power cut. `folder` is the descriptor of the
    folder that the file is in. Raises OSError; then the old content stays.
    """
    new = f".{name}.new"
    with open_fd(new, REWRITE, folder) as fd:
        try:
            write_all(fd, data)
            os.fsync(fd)
            os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            remove(new, folder)
            raise
    os.fsync(folder)


def remove(name: str, folder: int) -> None:
    """Delete the file `name` in the folder with the descriptor `folder`. A missing file is no error."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def write_audit(root: str, op: str, **fields: Any) -> str | None:
    """Append a line about a finished operation to the audit `audit.jsonl` of the queue.

    Never raises: the operation has succeeded, and an error would make it look as if it had not.

    Args:
        root: The queue's folder.
        op: The operation, such as `send`.
        fields: More fields of the line. Bodies of messages do not belong there.

    Returns:
        None if the line was written, otherwise the reason why not.
    """
    path = f"{root}/{AUDIT}"
    try:
        with open_fd(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return f"the audit {path} was not written: it is not a regular file"
            # Sessions have locks of their own but share this file, so the file itself is locked.
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                append(fd, to_line({"ts": stamp(), "op": op, **fields}))
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
    except Exception as error:  # noqa: BLE001 - see above
        why = os.strerror(error.errno or errno.EIO) if isinstance(error, OSError) else str(error)
        return f"the audit {path} was not written: {why}"
    return None


def _make_folders(root: str, session_path: str) -> None:
    os.makedirs(root.rpartition("/")[0] or "/", exist_ok=True)  # noqa: PTH103 - see message_queue
    for path in (
        root,
        f"{root}/sessions",
        session_path,
        f"{session_path}/{BODIES}",
        f"{session_path}/{CURSORS}",
    ):
        _mkdir(path)


def _mkdir(path: str, folder: int | None = None) -> None:
    try:
        os.mkdir(path, FOLDER_MODE, dir_fd=folder)
    except FileExistsError:
        return
