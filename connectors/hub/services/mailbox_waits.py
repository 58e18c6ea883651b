"""Waits for messages, and what each request has got.

A wait is woken when a message for its mailbox is settled (DL-01).

A *taker* wants to take messages for itself. A message wakes one taker of its mailbox, the one that waits
longest. A *watcher* only looks, and each message wakes all watchers of its mailbox. A taker that repeats a
request is woken, too, when messages are settled that the log gave to this request before.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from schemas.fold.settled import AppliedChange
from schemas.streams.mailboxes.message import DEFAULT_REALM, UNREAD, MessageRow
from schemas.streams.principal.principals import ACTIVE, PrincipalRow
from schemas.streams.task.task_registry import TokenRow

Mailbox = tuple[str, str]
"""Realm and recipient."""
# The fold knows the newest 256 requests of a mailbox; this is the number over all mailboxes.
_REQUESTS: Final = 20_000


def same_request(request_id: str) -> str:
    """Return the part of the id of a claim or lease that all records of the same request have in common."""
    return request_id[:-2]


class HandedMessages:
    """An index of messages by the request that got them: the newest 20,000 requests. Not thread-safe.

    A mailbox is given as the pair of realm and recipient. The index maps text to text (decision 0056).
    """

    def __init__(self) -> None:
        # By `<realm>/<recipient>/<request id>`.
        self._handed: dict[str, dict[str, None]] = {}
        # By `same_request`: the key in `_handed`. Only one record of a request gets messages.
        self._asked: dict[str, str] = {}

    def note(self, mailbox: Mailbox, request_id: str, message_id: str) -> None:
        """Add a message that a request has got."""
        key = "/".join((*mailbox, request_id))
        self._handed.setdefault(key, {})[message_id] = None
        self._asked[same_request(request_id)] = key
        if len(self._handed) > _REQUESTS:
            oldest = next(iter(self._handed))
            del self._handed[oldest]
            self._asked.pop(same_request(oldest.split("/", 2)[2]), None)

    def of(self, mailbox: Mailbox, request_id: str) -> list[str]:
        """Return the ids of the messages that one record of a request got from a mailbox, in no order."""
        return list(self._handed.get("/".join((*mailbox, request_id)), ()))

    def earlier(self, mailboxes: Sequence[Mailbox], request: str) -> tuple[Mailbox, str] | None:
        """Return the one of these mailboxes from which a request got messages, and the id of its record.

        `request` is that of `same_request`. The result is None if it got none.
        """
        found = self._asked.get(request)
        if found is None:
            return None
        realm, recipient, request_id = found.split("/", 2)
        return ((realm, recipient), request_id) if (realm, recipient) in mailboxes else None


class MailboxWait:
    """One wait for messages of some mailboxes. `MailboxWaits` makes it.

    Its owner calls `clear`, and then looks for messages. If there are none, a coroutine calls `wait`. An owner
    that has given `on_wake` returns; the event loop calls this function at each wake-up.
    """

    def __init__(
        self,
        mailboxes: Sequence[Mailbox],
        is_taker: bool,
        request: str | None,
        on_wake: Callable[[], object] | None,
    ) -> None:
        self.mailboxes = mailboxes
        self.is_taker = is_taker
        self.request = request
        self.is_woken = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._event = asyncio.Event()
        self._on_wake = on_wake or self._event.set

    def clear(self) -> None:
        """Forget earlier messages. Messages that are settled from now on end the next `wait`."""
        self.is_woken = False
        self._event.clear()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until a message was settled after the call of `clear`, and return True.

        Returns False when `timeout_s` seconds have passed before.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """End the present or the next `wait`. May be called on any thread."""
        self.is_woken = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._on_wake)
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._on_wake)


class MailboxWaits:
    """All waits for messages at this gateway. Thread-safe for one thread that calls `changed`, and any others.

    Register `changed` with the live view after that of `MailboxIndex`, so that the index has a message before
    its takers look for it.
    """

    follows = (PrincipalRow, TokenRow, MessageRow)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In the order in which the waits began.
        self._waits: dict[Mailbox, dict[MailboxWait, None]] = {}

    @contextmanager
    def waiting(
        self, mailboxes: Sequence[Mailbox], *, is_taker: bool, request: str | None = None
    ) -> Iterator[MailboxWait]:
        """Begin a wait of a coroutine, as `begin` does. It ends with the `with` block."""
        wait = self.begin(mailboxes, is_taker=is_taker, request=request)
        try:
            yield wait
        finally:
            self.end(wait)

    def begin(
        self,
        mailboxes: Sequence[Mailbox],
        *,
        is_taker: bool,
        request: str | None = None,
        on_wake: Callable[[], object] | None = None,
    ) -> MailboxWait:
        """Begin a wait for messages of these mailboxes. Call it in the event loop, and `end` in the end.

        Args:
            mailboxes: The mailboxes.
            is_taker: Whether the wait is of a taker.
            request: The part that all ids of a repeatable request have in common (`same_request`).
            on_wake: The function that the event loop calls at each wake-up. None: a coroutine calls `wait`.
        """
        wait = MailboxWait(mailboxes, is_taker, request, on_wake)
        with self._lock:
            for mailbox in mailboxes:
                self._waits.setdefault(mailbox, {})[wait] = None
        return wait

    def end(self, wait: MailboxWait) -> None:
        """End a wait. Another taker is woken, because this one may not have taken what it was woken for."""
        with self._lock:
            for mailbox in wait.mailboxes:
                del self._waits[mailbox][wait]
                if not self._waits[mailbox]:
                    del self._waits[mailbox]
                elif wait.is_taker:
                    self._wake_taker(mailbox)

    def count(self) -> int:
        """Return the number of waits that are open. A wait for several mailboxes counts once for each."""
        with self._lock:
            return sum(len(waits) for waits in self._waits.values())

    def changed(self, change: AppliedChange) -> None:
        """Wake the waits of a mailbox that has a message which nobody holds: a new one, or one that came back.

        A message that was handed out wakes the wait of the request that got it. If a token of the mailbox's
        owner was revoked, all its waits are woken, so that each looks at its own token. The live view's thread
        calls this method for each changed row. All other rows are ignored.
        """
        row = change.row
        if isinstance(row, (PrincipalRow, TokenRow)) and row.status != ACTIVE:
            self._wake_all_of(row.principal if isinstance(row, PrincipalRow) else row.agent_name)
            return
        if not isinstance(row, MessageRow):
            return
        mailbox = (row.realm, row.recipient)
        if mailbox not in self._waits:
            return
        if row.status != UNREAD:
            self._wake_request(mailbox, row.request_id)
            return
        with self._lock:
            for wait in self._waits.get(mailbox, ()):
                if not wait.is_taker:
                    wait.wake()
            self._wake_taker(mailbox)

    def wake_all(self) -> None:
        """Wake every wait, because the gateway stops."""
        with self._lock:
            for waits in self._waits.values():
                for wait in waits:
                    wait.wake()

    def _wake_all_of(self, owner: str) -> None:
        with self._lock:
            for wait in self._waits.get((DEFAULT_REALM, owner), ()):
                wait.wake()

    def _wake_request(self, mailbox: Mailbox, request_id: str | None) -> None:
        request = request_id and same_request(request_id)
        with self._lock:
            for wait in self._waits.get(mailbox, ()):
                if wait.request is not None and wait.request == request:
                    wait.wake()

    def _wake_taker(self, mailbox: Mailbox) -> None:
        for wait in self._waits.get(mailbox, ()):
            if wait.is_taker and not wait.is_woken:
                wait.wake()
                return
