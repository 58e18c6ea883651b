"""Waits of coroutines for messages: each is woken when a message for its mailbox is settled (DL-01).

A *taker* wants to take messages for itself. A message wakes one taker of its mailbox, the one that waits
longest. A *watcher* only looks, and each message wakes all watchers of its mailbox.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from connectors.gateway.services.mailboxes import Mailbox
from schemas.fold.settled import AppliedChange
from schemas.streams.mailboxes.message import DEFAULT_REALM, UNREAD, MessageRow
from schemas.streams.principal.principals import ACTIVE, PrincipalRow
from schemas.streams.task.task_registry import TokenRow


class MailboxWait:
    """The wait of one coroutine for messages of some mailboxes. `MailboxWaits` makes it.

    The coroutine calls `clear`, looks for messages, and calls `wait` if there are none.
    """

    def __init__(self, mailboxes: Sequence[Mailbox], is_taker: bool) -> None:
        self.mailboxes = mailboxes
        self.is_taker = is_taker
        self.is_woken = False
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

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
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._event.set)


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
    def waiting(self, mailboxes: Sequence[Mailbox], *, is_taker: bool) -> Iterator[MailboxWait]:
        """Begin a wait for messages of these mailboxes, which ends with the `with` block.

        `is_taker` tells takers from watchers. Afterwards another taker is woken, because this one may have been
        woken for a message that it did not take.
        """
        wait = MailboxWait(mailboxes, is_taker)
        with self._lock:
            for mailbox in mailboxes:
                self._waits.setdefault(mailbox, {})[wait] = None
        try:
            yield wait
        finally:
            with self._lock:
                for mailbox in mailboxes:
                    del self._waits[mailbox][wait]
                    if not self._waits[mailbox]:
                        del self._waits[mailbox]
                    elif is_taker:
                        self._wake_taker(mailbox)

    def count(self) -> int:
        """Return the number of waits that are open. A wait for several mailboxes counts once for each."""
        with self._lock:
            return sum(len(waits) for waits in self._waits.values())

    def changed(self, change: AppliedChange) -> None:
        """Wake the waits of a mailbox that has a message which nobody holds: a new one, or one that came back.

        If a token of the mailbox's owner was revoked, all its waits are woken, so that each looks at its own
        token. The live view's thread calls this method for each changed row. All other rows are ignored.
        """
        row = change.row
        if isinstance(row, (PrincipalRow, TokenRow)) and row.status != ACTIVE:
            self._wake_all_of(row.principal if isinstance(row, PrincipalRow) else row.agent_name)
            return
        if not isinstance(row, MessageRow) or row.status != UNREAD:
            return
        mailbox = (row.realm, row.recipient)
        if mailbox not in self._waits:
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

    def _wake_taker(self, mailbox: Mailbox) -> None:
        for wait in self._waits.get(mailbox, ()):
            if wait.is_taker and not wait.is_woken:
                wait.wake()
                return
