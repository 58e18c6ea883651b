"""The mailboxes as the gateway's handlers need them: what waits in which, and what a request was handed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from connectors.gateway.web.policy import Caller
from connectors.live.live_state import FINAL_MESSAGES
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import MAILBOX_VIEW, MessageRow, Row
from schemas.wire.ids import NAME_LIMIT
from schemas.wire.message import DEFAULT_REALM, MESSAGE_PENDING

# A mailbox knows its newest 256 requests again; so many are known here, of all mailboxes together.
_REQUESTS: Final = 20_000
_MESSAGES: Final = 100_000
Mailbox = tuple[str, str]
"""Realm and recipient."""


def token_mailbox(agent_name: str, token_id: str) -> str:
    """The recipient that one running task of an agent is, where each token has a mailbox of its own."""
    return f"{agent_name[: NAME_LIMIT - len(token_id) - 1]}.{token_id}"


def own_mailboxes(caller: Caller, per_token: bool) -> tuple[Mailbox, ...]:
    """What a caller drains, in this order: its token's own mailbox, if it has one, then that of its name."""
    of_name = (DEFAULT_REALM, caller.principal)
    if not per_token or caller.token_id is None:
        return (of_name,)
    return ((DEFAULT_REALM, token_mailbox(caller.principal, caller.token_id)), of_name)


class MailboxIndex:
    """What waits, and what each claim was handed, by mailbox; kept up to date by the live view's changes.

    One thread changes, any thread looks up. What it keeps of a message is text under text: with tuples and sets
    Python's collector came by more often, and stayed longer (decision 0014).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Mailbox, set[str]] = {}
        # By `<realm>/<recipient>/<request id>`.
        self._handed: dict[str, dict[str, None]] = {}
        # By message id: `<realm>/<recipient>`.
        self._mailbox_of: dict[str, str] = {}
        self._kept: dict[Mailbox, dict[str, None]] = {}
        # The keys of those of them that are final, the one that became so longest ago first.
        self._final: dict[str, None] = {}
        # Until the rows are loaded: what has changed meanwhile, and may come as it was before.
        self._changed: set[str] | None = set()

    def load(self, rows: Iterable[Row]) -> None:
        """Take in what the live view held when it was opened; what came by `changed` meanwhile is there.

        What became final first comes first: the newest are kept, as in the live view.
        """
        messages = [row for row in rows if isinstance(row, MessageRow)]
        for row in sorted(messages, key=lambda row: row.ended_at or 0):
            with self._lock:
                if self._changed is None or _key_of(row) not in self._changed:
                    self._take_in(row)
        with self._lock:
            self._changed = None

    def changed(self, change: AppliedChange) -> None:
        """Take in a change of the live view."""
        if change.view != MAILBOX_VIEW or not isinstance(change.row, MessageRow):
            return
        with self._lock:
            if self._changed is not None:
                self._changed.add(change.key)
            self._take_in(change.row)

    def mailbox_of(self, message_id: str) -> Mailbox | None:
        """Where a message of this id was posted lately; None when that is not known any more."""
        with self._lock:
            found = self._mailbox_of.get(message_id)
        if found is None:
            return None
        realm, _, recipient = found.partition("/")
        return realm, recipient

    def depth(self, mailbox: Mailbox) -> int:
        """How many messages wait in a mailbox or are leased from it."""
        with self._lock:
            return len(self._waiting.get(mailbox, ()))

    def waiting(self, mailbox: Mailbox) -> list[str]:
        """The ids of the messages that wait in a mailbox or are leased from it, in no order."""
        with self._lock:
            return list(self._waiting.get(mailbox, ()))

    def messages(self, mailbox: Mailbox) -> list[str]:
        """The ids of all messages of a mailbox that the live view may have: of the final ones the newest."""
        with self._lock:
            return list(self._kept.get(mailbox, ()))

    def depths(self) -> dict[Mailbox, int]:
        """The depth of each mailbox in which something waits."""
        with self._lock:
            return {mailbox: len(waiting) for mailbox, waiting in self._waiting.items()}

    def handed(self, mailbox: Mailbox, request_id: str) -> list[str]:
        """The ids of the messages that the request was handed, in no order."""
        with self._lock:
            return list(self._handed.get("/".join((*mailbox, request_id)), ()))

    def _take_in(self, row: MessageRow) -> None:
        mailbox = (row.realm, row.recipient)
        self._mailbox_of[row.message_id] = "/".join(mailbox)
        if len(self._mailbox_of) > _MESSAGES:
            del self._mailbox_of[next(iter(self._mailbox_of))]
        self._keep(row, is_final=row.status not in MESSAGE_PENDING)
        if row.status in MESSAGE_PENDING:
            self._waiting.setdefault(mailbox, set()).add(row.message_id)
        else:
            waiting = self._waiting.get(mailbox)
            if waiting is not None:
                waiting.discard(row.message_id)
                if not waiting:
                    del self._waiting[mailbox]
        if row.request_id is not None:
            request = "/".join((*mailbox, row.request_id))
            self._handed.setdefault(request, {})[row.message_id] = None
            if len(self._handed) > _REQUESTS:
                del self._handed[next(iter(self._handed))]

    def _keep(self, row: MessageRow, *, is_final: bool) -> None:
        key = _key_of(row)
        self._kept.setdefault((row.realm, row.recipient), {})[row.message_id] = None
        self._final.pop(key, None)
        if not is_final:
            return
        self._final[key] = None
        if len(self._final) > FINAL_MESSAGES:
            oldest = next(iter(self._final))
            del self._final[oldest]
            realm, recipient, message_id = oldest.split("/")  # names, in which there is no slash
            kept = self._kept[realm, recipient]
            del kept[message_id]
            if not kept:
                del self._kept[realm, recipient]


def _key_of(row: MessageRow) -> str:
    return f"{row.realm}/{row.recipient}/{row.message_id}"
