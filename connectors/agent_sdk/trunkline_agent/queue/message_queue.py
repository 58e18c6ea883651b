"""The file queue itself: send, poll, tail, expire and status (FQ-02 to FQ-09).

Delivers: each message at most once to each consumer; a consumer is an agent id.
Acknowledges when: the sender's line is on the disk (without fsync: written); the consumer's cursor is on the
disk before it gets the messages; it is moved back if the consumer cannot show them.
Loses when: a consumer is killed after its cursor has moved and before it has handled the messages;
docs/how-to/use_the_file_queue.md has the whole list.
"""

from __future__ import annotations

import os
import time

from trunkline_agent.queue.cursors import messages_between, open_messages, put_back, read_cursor, write_cursor
from trunkline_agent.queue.message_record import (
    CARRIED,
    UTF16_ADVICE,
    blob_file_of,
    check_durations,
    checked_fields,
    checked_name,
    checked_priority,
    checked_topic,
    checked_topics,
    encoded_body,
    new_id,
    parse_line,
    rank,
    reference,
    stamp,
    to_line,
)
from trunkline_agent.queue.queue_errors import DiskErrors, QueueError
from trunkline_agent.queue.queue_settings import (
    DEFAULT_SENDER,
    QueueSettings,
    check_enabled,
    checked_threshold,
    find_root,
    is_disabled,
)
from trunkline_agent.queue.session_files import (
    AUDIT,
    DELAYED,
    MESSAGES,
    SessionFolder,
    append,
    write_audit,
)
from trunkline_agent.queue.session_lock import lock_session, no_step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import Any

    Show = Callable[[list[dict[str, Any]]], object]
AUDITED_IDS = 4000  # in a line of the audit; with 128 characters each they take half a mebibyte


class Queue:
    """A file queue in a folder: the methods to send, take, show and remove messages.

    It keeps no files open between calls, so threads and processes may share it. Every method raises QueueError
    when the disk or the folder cannot be used, and ValueError for an invalid name. Arguments that are None come
    from the environment (FQ-11). `audit_error`: why the last audit line could not be written, or None.
    `lines_error`: why the last poll could not read lines, or None; a poll goes on after invalid lines.

    Args:
        root: The queue's folder.
        body_threshold: A body of more bytes than this is written to a file of its own, a side-file.
        fsync: True: after `send` the message is on the disk. False: a power cut may lose it.
        step: Called with a name after each step, for tests.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        body_threshold: int | None = None,
        fsync: bool | None = None,
        step: Callable[[str], None] = no_step,
    ) -> None:
        settings = QueueSettings(os.environ)
        # os.path, as in the whole package: importing pathlib takes longer than a send.
        self._root = os.path.abspath(find_root(os.environ) if root is None else os.fspath(root))  # noqa: PTH100
        self._session = settings.session
        self.agent_id = settings.agent_id
        self._sender = settings.agent_id or DEFAULT_SENDER
        threshold = settings.body_threshold if body_threshold is None else body_threshold
        self.body_threshold = checked_threshold(threshold, "body_threshold")
        self.fsync = settings.fsync if fsync is None else fsync
        self.audit_error: str | None = None
        self.lines_error: str | None = None
        self._step = step

    @property
    def root(self) -> Path:
        """The queue's folder."""
        from pathlib import Path

        return Path(self._root)

    @property
    def audit_path(self) -> Path:
        """The path of the audit, a file with a line for each send, delivery, poll and expire."""
        return self.root / AUDIT

    def send(
        self,
        topic: str,
        body: str,
        to: str | None = None,
        ttl_s: float | None = None,
        session: str | None = None,
        sender: str | None = None,
        reply_to: str | None = None,
        deliver_after_s: float | None = None,
        priority: str | None = None,
        **fields: str | None,
    ) -> str:
        """Append a message and return its new id.

        Args:
            topic: One of `TOPICS`, such as `ask`, or TopicError is raised.
            body: The text, at most 16 MiB.
            to: The recipient. None, `all` or `broadcast` addresses every agent that polls.
            ttl_s: The time in seconds until the message expires, from 0.001 to 366 days; None for no limit.
            session: The session; None for the variable TRUNKLINE_QUEUE_SESSION, else `default`.
            sender: The sender; None for the variable TRUNKLINE_QUEUE_AGENT_ID, else `anonymous`.
            reply_to: The id of the message that this one answers, or None.
            deliver_after_s: The same until an agent gets the message, less than `ttl_s`; None for no delay.
            priority: `high`, `normal` or `low`. A poll returns higher ones first. None counts as `normal`.
            fields: Any of `FIELDS_IF_GIVEN`, such as `thread`. None leaves a field out of the line.

        Raises ValueError, QueueError, or QueueDisabledError if the queue is switched off. After a QueueError
        about fsync it is unknown whether the message is kept. After any other error it was not sent.
        """
        check_enabled(os.environ)
        check_durations(deliver_after_s, ttl_s)
        record: dict[str, Any] = {
            "msg_id": new_id(),
            "ts": stamp(),
            "from": checked_name(self._sender if sender is None else sender, "the sender"),
            "to": None if to is None else checked_name(to, "the recipient"),
            "topic": checked_topic(topic),
            "body": body,
            "in_reply_to": None if reply_to is None else checked_name(reply_to, "the message replied to"),
            "ttl_s": ttl_s,
            **checked_fields(fields),
            **({} if priority is None else {"priority": checked_priority(priority)}),
        }
        where = self._named(session)
        line, side_file, text = self._line(record)
        with DiskErrors("the message", self._root), SessionFolder(self._root, where, create=True) as folder:
            if deliver_after_s is None:
                self._append(folder, where, line, side_file, text)
            else:
                from trunkline_agent.queue.delayed_messages import store_delayed

                self._lock(folder, where)
                store_delayed(folder, record, time.time() + deliver_after_s)
                self._step("delayed")
        about: dict[str, Any] = {
            "body_bytes": len(text),
            "externalized": side_file is not None,
            "ttl_s": ttl_s,
        }
        about |= {} if deliver_after_s is None else {"deliver_after_s": deliver_after_s}
        self._audit_message("send", where, record, **about)
        return str(record["msg_id"])

    def deliver(self, record: dict[str, Any], session: str, parts: Iterable[bytes] | None = None) -> None:
        """Append a message from a mailbox of Trunkline under its own id and time; the file bridge calls this.

        The line is marked, so that the bridge does not send the message back. `record` has the fields that
        `parse_line` returns. `parts` are the bytes of its blob, or without a field `blob` its body, which is
        then a reference. Raises ValueError if they are no message, QueueError, QueueDisabledError, or an error
        of `parts`.
        """
        check_enabled(os.environ)
        where = self._named(session)
        marked = {**record, **CARRIED}
        is_body = parts is not None and "blob" not in record
        line, side_file, text = (to_line(marked), None, b"") if is_body else self._line(marked)
        if parse_line(line[:-1]) is None:
            raise ValueError("not a message of the queue")
        with DiskErrors("the message", self._root), SessionFolder(self._root, where, create=True) as folder:
            if parts is not None:
                from trunkline_agent.queue.side_files import write_content

                write_content(folder, blob_file_of(record) or f"{record['msg_id']}.txt", parts)
                self._step("content_written")
            if side_file:  # left from a delivery that was killed before its line
                folder.remove_bodies([side_file])
            self._append(folder, where, line, side_file, text)
        self._audit_message("deliver", where, record)

    def release(self, session: str | None = None) -> int:
        """Append the delayed messages of a session whose time has come to its file of messages to take.

        `poll` and `expire` do this, too. It waits for the session's lock.

        Returns:
            The number of the messages. 0 if the queue is off.

        Raises:
            ValueError: The session's name is not valid.
            QueueError: There is no such session, or the disk or the folder cannot be used.
        """
        where = self._named(session)
        if is_disabled(os.environ):
            return 0
        with DiskErrors("the release", self._root), SessionFolder(self._root, where, create=False) as folder:
            self._lock(folder, where)
            return self._release(folder, where)

    def _release(self, folder: SessionFolder, session: str) -> int:
        if not folder.has(DELAYED):
            return 0
        from trunkline_agent.queue.delayed_messages import release_due

        ids = release_due(folder, time.time(), self._line, self._step)
        for start in range(0, len(ids), AUDITED_IDS):
            self._audit("release", session=session, msg_ids=ids[start : start + AUDITED_IDS])
        return len(ids)

    def _line(self, record: dict[str, Any]) -> tuple[bytes, str | None, bytes]:
        """Return a record's line, the name of its side-file if its body is long, and its body."""
        text, msg_id = encoded_body(record["body"]), record["msg_id"]
        if len(text) <= self.body_threshold:
            return to_line(record), None, text
        return to_line({**record, "body": reference(msg_id)}), f"{msg_id}.txt", text

    def _audit_message(self, op: str, session: str, record: dict[str, Any], **fields: Any) -> None:
        shown = {name: record[name] for name in ("msg_id", "topic", "to", "from")}
        self._audit(op, session=session, **shown, **fields)
        self._step("audited")

    def _append(
        self, folder: SessionFolder, session: str, line: bytes, side_file: str | None, body: bytes
    ) -> None:
        if side_file:
            folder.write_body(side_file, body)
            self._step("side_file_written")
        fd = -1
        try:
            try:
                self._lock(folder, session)
                fd = open_messages(folder)
                self._step("before_append")
                append(fd, line)
            except (OSError, QueueError):
                if side_file:
                    folder.remove_bodies([side_file])
                raise
            self._step("appended")
            folder.unlock()
            # Outside the lock, so that senders share one sync. An expire in between syncs the line itself.
            if self.fsync:
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise QueueError(
                        f"the disk could not confirm the message (fsync: {error.strerror}): readers may "
                        "see it, and a power cut may take it"
                    ) from error
                self._step("synced")
        finally:
            if fd >= 0:
                os.close(fd)

    def poll(
        self, agent_id: str, topics: Iterable[str] | None = None, session: str | None = None, show: Show = id
    ) -> list[dict[str, Any]]:
        """Take the new messages for an agent and return them. Each is returned only once.

        Those of a higher priority come first, and else the oldest. With `topics`, only messages of these topics
        are returned, and the others are skipped for good. The agent's cursor (how far it has read) is on the
        disk before this returns. It waits for the session's lock, not for messages: the list is empty if
        nothing is new or the queue is off. Raises TopicError, ValueError, or QueueError, also for an invalid
        cursor. `show` is called with the messages: if it fails, the next poll returns them again, unless
        another poll of the agent was faster.
        """
        checked_name(agent_id, "the agent")
        wanted = None if topics is None else checked_topics(topics)
        where = self._named(session)
        if is_disabled(os.environ):
            return []
        with DiskErrors("the poll", self._root), SessionFolder(self._root, where, create=True) as folder:
            self._lock(folder, where)
            self._release(folder, where)
            old = read_cursor(folder, agent_id)
            found, new = self._scan(folder, agent_id, wanted, old or 0)
            self._step("scanned")
            if new != old:
                write_cursor(folder, agent_id, new)
                if old is None:
                    folder.sync_path()
            self._step("cursor_written")
        try:
            show(found)
        except BaseException:
            with SessionFolder(self._root, where, create=False) as folder:
                lock_session(folder)
                put_back(folder, agent_id, old or 0, new)
            raise
        # Behind `show`, because the file bridge takes the messages of this line out of their mailbox.
        ids = [message["msg_id"] for message in found]
        moved = {"cursor_from": old or 0, "cursor_to": new}
        # In several lines, because readers ignore an over-long line.
        for start in range(0, len(ids) or 1, AUDITED_IDS):
            piece = ids[start : start + AUDITED_IDS]
            named = {"agent_id": agent_id, "topics": wanted, "matched": len(piece), **moved, "msg_ids": piece}
            self._audit("poll", session=where, **named)
        self._step("audited")
        return found

    def _scan(
        self, folder: SessionFolder, agent_id: str, wanted: list[str] | None, start: int
    ) -> tuple[list[dict[str, Any]], int]:
        from trunkline_agent.queue.side_files import with_body

        self.lines_error = None
        fd = folder.open_file(MESSAGES)
        if fd is None:
            return [], 0
        with fd:
            size = os.fstat(fd).st_size
            if start >= size:
                return [], size  # if the file was cut, the rest was delivered
            found, end, utf16 = messages_between(fd, start, size, agent_id, wanted)
            if utf16:
                self.lines_error = f"{utf16} new lines of {folder.path} {UTF16_ADVICE}"
            if end != start:
                # If a power cut loses lines but not the cursor, new lines would be before the cursor.
                os.fsync(fd)
            return [with_body(folder, message) for message in sorted(found, key=rank)], end

    def tail(
        self, n: int = 10, include_expired: bool = False, session: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the last `n` messages to any recipient, oldest first, without taking them; empty if none."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"n must be a number of messages, 0 or more, not {str(n)[:40]!r}")
        from trunkline_agent.queue.queue_status import last_messages

        where = self._named(session)
        with DiskErrors("the look at the queue", self._root):
            return last_messages(self._root, where, n, include_expired)

    def expire(self, session: str | None = None) -> int:
        """Remove the expired messages of a session, and return their number; 0 without such a session.

        Their side-files, and unused ones older than a day, are removed too. It waits for the session's lock.
        """
        from trunkline_agent.queue.expiry import expire_messages

        where = self._named(session)
        if is_disabled(os.environ):
            return 0
        with DiskErrors("the expire", self._root):
            try:
                with SessionFolder(self._root, where, create=False) as folder:
                    self._lock(folder, where)
                    self._release(folder, where)
                    removed, orphans = expire_messages(folder, time.time(), self._step)
            except FileNotFoundError:
                return 0
        self._audit("expire", session=where, removed=removed, **({"orphans": orphans} if orphans else {}))
        self._step("audited")
        return removed

    def status(self, session: str | None = None) -> dict[str, Any]:
        """Return the numbers of messages and bytes of one session, or of all sessions if `session` is None.

        The dict has sums such as `messages`, and under `sessions` each session's numbers and cursors. It takes
        no lock.
        """
        from trunkline_agent.queue.queue_status import queue_status

        if session is not None:
            checked_name(session, "the session")
        with DiskErrors("the look at the queue", self._root):
            return queue_status(self._root, session)

    def _named(self, session: str | None) -> str:
        return checked_name(self._session if session is None else session, "the session")

    def _lock(self, folder: SessionFolder, session: str) -> None:
        removed = lock_session(folder, self._step)
        if removed is not None:
            self._audit("expire", session=session, removed=removed, finished_for_another=True)

    def _audit(self, op: str, **fields: Any) -> None:
        self.audit_error = write_audit(self._root, op, **fields)
