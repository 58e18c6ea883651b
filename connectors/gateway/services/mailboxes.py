"""An index of mailboxes: the messages that wait in each, and those that each request to drain received."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from connectors.gateway.services.row_index import RowIndex
from connectors.gateway.web.policy import Caller
from connectors.live.live_state import FINAL_MESSAGES
from schemas.streams.mailboxes.message import DEFAULT_REALM, MESSAGE_PENDING, MessageRow
from schemas.wire.ids import NAME_LIMIT

# The fold knows the newest 256 requests of a mailbox; this is the number over all mailboxes.
_REQUESTS: Final = 20_000
_MESSAGES: Final = 100_000
Mailbox = tuple[str, str]
"""Realm and recipient."""


def token_mailbox(agent_name: str, token_id: str) -> str:
    """Return the name of the mailbox of one task of an agent: `<agent name>.<token id>`.

    The setting `gateway.mailbox_per_token` gives each task of an agent such a mailbox. `token_id` is the
    `token_id` of the task's token, the first digits of its hash. The agent's name is cut if the result would be
    too long.
    """
    return f"{agent_name[: NAME_LIMIT - len(token_id) - 1]}.{token_id}"


def own_mailboxes(caller: Caller, per_token: bool) -> tuple[Mailbox, ...]:
    """Return the mailboxes that a caller may drain: first that of its task's token, then that of its name.

    `per_token` is the setting `gateway.mailbox_per_token`. If it is False, or the caller has no token of a
    task, the result is only the mailbox of the caller's name. The mailboxes need not exist.
    """
    of_name = (DEFAULT_REALM, caller.principal)
    if not per_token or caller.token_id is None:
        return (of_name,)
    return ((DEFAULT_REALM, token_mailbox(caller.principal, caller.token_id)), of_name)


class MailboxIndex(RowIndex[MessageRow]):
    """An index of messages by mailbox, and by the request that drained or leased them.

    A mailbox is given as the pair of realm and recipient. The index maps text to text: tuples and sets made
    Python's garbage collector run more often and longer (decision 0014).
    """

    def __init__(self) -> None:
        super().__init__(MessageRow)
        self._waiting: dict[Mailbox, set[str]] = {}
        # By `<realm>/<recipient>/<request id>`.
        self._handed: dict[str, dict[str, None]] = {}
        # By message id: `<realm>/<recipient>`.
        self._mailbox_of: dict[str, str] = {}
        self._kept: dict[Mailbox, dict[str, None]] = {}
        # The keys of the final messages among them, oldest end first.
        self._final: dict[str, None] = {}

    def load(self, rows: Iterable[MessageRow]) -> None:
        """Add the messages that the live view contains when it is open. Call it once, after `LiveView.open`.

        A message that `changed` has already added is newer, so it is kept.
        """
        # In the order of their ends, so that the newest final messages are kept, as in the live view.
        super().load(sorted(rows, key=lambda row: row.ended_at or 0))

    def mailbox_of(self, message_id: str) -> Mailbox | None:
        """Return the mailbox that a message was posted to, or None if its id is unknown or too old.

        The index has the newest 100,000 ids.
        """
        with self._lock:
            found = self._mailbox_of.get(message_id)
        if found is None:
            return None
        realm, _, recipient = found.partition("/")
        return realm, recipient

    def depth(self, mailbox: Mailbox) -> int:
        """Return how many messages of a mailbox wait or are leased, 0 for an unknown mailbox."""
        with self._lock:
            return len(self._waiting.get(mailbox, ()))

    def waiting(self, mailbox: Mailbox) -> list[str]:
        """Return the ids of the messages of a mailbox that wait or are leased, in no order."""
        with self._lock:
            return list(self._waiting.get(mailbox, ()))

    def messages(self, mailbox: Mailbox) -> list[str]:
        """Return the ids of a mailbox's messages in the live view, waiting or not, in no order.

        The live view has every waiting message, but only the newest of those that were read, taken or expired.
        The list is empty for an unknown mailbox.
        """
        with self._lock:
            return list(self._kept.get(mailbox, ()))

    def depths(self) -> dict[Mailbox, int]:
        """Return the number of waiting and leased messages of each mailbox that has any."""
        with self._lock:
            return {mailbox: len(waiting) for mailbox, waiting in self._waiting.items()}

    def handed(self, mailbox: Mailbox, request_id: str) -> list[str]:
        """Return the ids of the messages that one request has drained or leased from a mailbox, in no order.

        `request_id` is the field `request_id` of the records that the request appended. The list is empty for
        an unknown request id, and for one that is too old to be in memory.
        """
        with self._lock:
            return list(self._handed.get("/".join((*mailbox, request_id)), ()))

    def _add(self, row: MessageRow) -> None:
        mailbox = (row.realm, row.recipient)
        self._mailbox_of[row.message_id] = "/".join(mailbox)
        if len(self._mailbox_of) > _MESSAGES:
            del self._mailbox_of[next(iter(self._mailbox_of))]
        self._keep(row)
        if row.status in MESSAGE_PENDING:
            self._waiting.setdefault(mailbox, set()).add(row.message_id)
        elif mailbox in self._waiting:
            self._waiting[mailbox].discard(row.message_id)
            if not self._waiting[mailbox]:
                del self._waiting[mailbox]
        if row.request_id is not None:
            request = "/".join((*mailbox, row.request_id))
            self._handed.setdefault(request, {})[row.message_id] = None
            if len(self._handed) > _REQUESTS:
                del self._handed[next(iter(self._handed))]

    def _keep(self, row: MessageRow) -> None:
        key = row.key
        self._kept.setdefault((row.realm, row.recipient), {})[row.message_id] = None
        self._final.pop(key, None)
        if row.status in MESSAGE_PENDING:
            return
        self._final[key] = None
        if len(self._final) > FINAL_MESSAGES:
            oldest = next(iter(self._final))
            del self._final[oldest]
            realm, recipient, message_id = oldest.split("/")  # names contain no slash
            kept = self._kept[realm, recipient]
            del kept[message_id]
            if not kept:
                del self._kept[realm, recipient]
