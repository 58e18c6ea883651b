"""An index of mailboxes: the messages that wait in each, and those that each request to drain received."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Final, NamedTuple, TypeVar

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import RowIndex, SortedKeys
from connectors.hub.services.mailbox_waits import HandedMessages, Mailbox
from connectors.hub.serving.policy import Caller
from schemas.streams.mailboxes.message import (
    DEAD,
    DEFAULT_REALM,
    DELAYED,
    LEASED,
    MESSAGE_FINAL,
    MESSAGE_PENDING,
    UNREAD,
    MessageRow,
)
from trunkline_agent.wire.ids import NAME_LIMIT

_MESSAGES: Final = 100_000
# The index has the newest of the messages in a final status. The live view reads more of them from its store.
FINAL_MESSAGES: Final = 50_000
K = TypeVar("K")
V = TypeVar("V")
_COUNT_MOST: Final = 2**32 - 1
_END: Final = b"\xff" * 9


class Depth(NamedTuple):
    """The contents of a mailbox in numbers.

    Attributes:
        mailbox: Realm and recipient.
        depth: The number of messages that wait or are leased.
        dead: The number of dead messages in the index.
        oldest: The time at which the oldest pending message was posted, in microseconds since 1970 UTC. None if
            none is pending.
    """

    mailbox: Mailbox
    depth: int
    dead: int
    oldest: int | None


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


def newest_final(live_view: LiveView) -> list[MessageRow]:
    """Return the newest 50,000 messages of the live view in a final status, the one that ended last first."""
    by_status = [live_view.newest_ended(MessageRow, status) for status in MESSAGE_FINAL]
    newest = heapq.merge(*by_status, key=lambda row: row.ended_at or 0, reverse=True)
    return list(islice(newest, FINAL_MESSAGES))


class MailboxIndex(RowIndex[MessageRow]):
    """An index of messages by mailbox, and by the request that drained or leased them.

    A mailbox is given as the pair of realm and recipient. The index maps text to text (decision 0056).
    """

    def __init__(self) -> None:
        super().__init__(MessageRow)
        # The pending messages with the times of their posting, in this order.
        self._waiting: dict[Mailbox, dict[str, int]] = {}
        # The leased messages among them with the ends of their leases.
        self._leased: dict[Mailbox, dict[str, int]] = {}
        # By message key: when its reader got each leased message, the one that is held for longest first.
        self._held_since: dict[str, int] = {}
        # The delayed messages with the times of their postings.
        self._delayed: dict[Mailbox, dict[str, int]] = {}
        # The pending messages by mailbox and status, in the order of `pending_page`.
        self._by_age = SortedKeys()
        # By `<realm>/<recipient>/<message id>`: the ids of the replies to this message.
        self._replies: dict[str, dict[str, None]] = {}
        # The dead messages with the times of their ends, in this order.
        self._dead: dict[Mailbox, dict[str, int]] = {}
        # By `<realm>/<recipient>/<id of a dead message>`: the ids of the messages that repeat it.
        self._replays: dict[str, dict[str, None]] = {}
        self._handed = HandedMessages()
        # By message id: `<realm>/<recipient>`.
        self._mailbox_of: dict[str, str] = {}
        self._kept: dict[Mailbox, dict[str, None]] = {}
        # The mailboxes that have pending or dead messages in the order of `deepest`, and all pending messages.
        self._by_depth = SortedKeys()
        self._pending = 0
        # By task id: the keys of the messages that the agent of the task sent.
        self._of_task: dict[str, dict[str, None]] = {}
        # The keys of the final messages among them, oldest end first. Each with the message that it replies to,
        # the one that it repeats and the sender's task, joined by slashes.
        self._final: dict[str, str] = {}

    def load(self, rows: Iterable[MessageRow]) -> None:
        """Add the messages that the live view contains when it is open. Call it once, after `LiveView.open`.

        A message that `changed` has already added is newer, so it is kept.
        """
        # In the order of their ends, so that the newest final messages are kept.
        super().load(sorted(rows, key=lambda row: (row.ended_at or 0, row.posted_at)))
        with self._lock:
            # Newer messages came by `changed` before the older ones of the tables.
            for times in (self._waiting, self._dead):
                for mailbox, messages in times.items():
                    times[mailbox] = dict(sorted(messages.items(), key=lambda one: one[1]))
            self._held_since = dict(sorted(self._held_since.items(), key=lambda one: one[1]))

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

    def size(self, mailbox: Mailbox) -> int:
        """Return how many messages of a mailbox are delayed, wait or are leased, 0 for an unknown mailbox."""
        with self._lock:
            return len(self._waiting.get(mailbox, ())) + len(self._delayed.get(mailbox, ()))

    def ready(self, mailbox: Mailbox, now_us: int) -> int:
        """Return how many messages of a mailbox nobody holds, 0 for an unknown mailbox.

        `now_us` is the log's time in microseconds since 1970 UTC. Messages that have expired count until
        somebody takes messages from the mailbox.
        """
        with self._lock:
            held = sum(until > now_us for until in self._leased.get(mailbox, {}).values())
            return len(self._waiting.get(mailbox, ())) - held

    def long_held(self, before_us: int, now_us: int) -> list[str]:
        """Return the keys of the messages that their readers got before a moment and still hold, longest first.

        Extensions of a lease do not count, so a reader that hangs and extends its lease is found. Times are in
        microseconds since 1970 UTC.
        """
        with self._lock:
            old = takewhile(lambda one: one[1] < before_us, self._held_since.items())
            found = []
            for key, _ in old:
                realm, recipient, message_id = key.split("/")  # names contain no slash
                if self._leased[realm, recipient][message_id] > now_us:
                    found.append(key)
            return found

    def posted_after(self, mailbox: Mailbox, posted_at: int) -> list[str]:
        """Return the ids of the pending messages that were posted after a message, in the order of posting.

        `posted_at` is the column of that message's row, in microseconds since 1970 UTC; 0 for all messages.
        """
        found = []
        with self._lock:
            for message_id, posted in reversed(self._waiting.get(mailbox, {}).items()):
                if posted <= posted_at:
                    break
                found.append(message_id)
        return found[::-1]

    def replies(self, mailbox: Mailbox, message_id: str) -> list[str]:
        """Return the ids of a mailbox's messages that reply to the message with this id, oldest first.

        The index has every waiting reply, and of the final ones those that `messages` has. The message with
        this id is in the mailbox of somebody else.
        """
        with self._lock:
            return list(self._replies.get("/".join((*mailbox, message_id)), ()))

    def dead_of(self, mailbox: Mailbox) -> list[str]:
        """Return the ids of the dead messages of a mailbox in the index, the one that died last first."""
        with self._lock:
            return list(reversed(self._dead.get(mailbox, {})))

    def dead_count(self, mailbox: Mailbox) -> int:
        """Return the number of dead messages of a mailbox in the index, 0 for an unknown mailbox."""
        with self._lock:
            return len(self._dead.get(mailbox, ()))

    def replays(self, mailbox: Mailbox, message_id: str) -> list[str]:
        """Return the ids of a mailbox's messages in the index that repeat a dead message, oldest first."""
        with self._lock:
            return list(self._replays.get("/".join((*mailbox, message_id)), ()))

    def of_task(self, task_id: str) -> list[str]:
        """Return the keys of the messages in the index that the agent of a task sent, oldest first."""
        with self._lock:
            return list(self._of_task.get(task_id, ()))

    def waiting(self, mailbox: Mailbox) -> list[str]:
        """Return the ids of the messages of a mailbox that wait or are leased, in no order."""
        with self._lock:
            return list(self._waiting.get(mailbox, ()))

    def pending_page(
        self, mailbox: Mailbox, status: str | None, after: tuple[int, str], most: int
    ) -> tuple[list[str], int]:
        """Return the ids of some of a mailbox's pending messages, oldest first, and the number of all of them.

        Args:
            mailbox: Realm and recipient.
            status: Only messages with this status. None: all pending ones.
            after: Time of posting in microseconds since 1970 UTC and id of the last message of the page before.
            most: The largest number of ids.
        """
        places: list[bytes] = []
        total = 0
        with self._lock:
            for one in MESSAGE_PENDING if status is None else MESSAGE_PENDING & {status}:
                prefix = _age_place(mailbox, one)
                end = prefix + _END
                # No place is between that of `after` and the same with a NUL.
                low = prefix + after[0].to_bytes(8, "big") + after[1].encode() + b"\0"
                places += [place[len(prefix) :] for place in self._by_age.lowest(low, end, most)]
                total += self._by_age.count(prefix, end)
        return [place[8:].decode() for place in sorted(places)[:most]], total

    def messages(self, mailbox: Mailbox) -> list[str]:
        """Return the ids of a mailbox's messages in the index, waiting or not, in no order.

        The index has every waiting message, and the newest 50,000 final ones of all mailboxes.
        """
        with self._lock:
            return list(self._kept.get(mailbox, ()))

    def deepest(self, most: int) -> list[Depth]:
        """Return up to `most` mailboxes that have waiting, leased or dead messages, deepest first.

        Those of one depth are in the order of their dead messages, most first, and then of their names.
        """
        with self._lock:
            places = self._by_depth.lowest(b"", _END, most)
            return [self._depth_of(place) for place in places]

    def totals(self) -> tuple[int, int]:
        """Return how many messages of all mailboxes are pending, and how many mailboxes `deepest` has."""
        with self._lock:
            return self._pending, len(self._by_depth)

    def handed(self, mailbox: Mailbox, request_id: str) -> list[str]:
        """Return the ids of the messages that one request (`request_id`) got from a mailbox, in no order."""
        with self._lock:
            return self._handed.of(mailbox, request_id)

    def earlier(self, mailboxes: Sequence[Mailbox], request: str) -> tuple[Mailbox, str] | None:
        """Return the one of these mailboxes from which a request got messages, and the id of its record.

        `request` is that of `same_request`. The result is None if it got none.
        """
        with self._lock:
            return self._handed.earlier(mailboxes, request)

    def _depth_of(self, place: bytes) -> Depth:
        realm, _, recipient = place[8:].decode().partition("\0")
        waiting = self._waiting.get((realm, recipient), {})
        dead = len(self._dead.get((realm, recipient), ()))
        return Depth((realm, recipient), len(waiting), dead, next(iter(waiting.values()), None))

    def _place(self, mailbox: Mailbox) -> bytes:
        """Return the place of a mailbox in the order of `deepest`; empty if it has no such message."""
        depth, dead = len(self._waiting.get(mailbox, ())), len(self._dead.get(mailbox, ()))
        if not depth and not dead:
            return b""
        order = ((_COUNT_MOST - depth) << 32) + _COUNT_MOST - dead
        return order.to_bytes(8, "big") + "\0".join(mailbox).encode()

    def _move(self, mailbox: Mailbox, before: bytes) -> None:
        """Move a mailbox to its present place in the order of `deepest`."""
        now = self._place(mailbox)
        if now != before:
            if before:
                self._by_depth.remove(before)
            if now:
                self._by_depth.add(now)

    def _add(self, row: MessageRow) -> None:
        mailbox = (row.realm, row.recipient)
        before, depth = self._place(mailbox), len(self._waiting.get(mailbox, ()))
        self._mailbox_of[row.message_id] = "/".join(mailbox)
        if len(self._mailbox_of) > _MESSAGES:
            del self._mailbox_of[next(iter(self._mailbox_of))]
        is_new = row.message_id not in self._kept.get(mailbox, ())
        self._keep(row)
        if is_new and row.status == UNREAD:
            self._waiting.setdefault(mailbox, {})[row.message_id] = row.posted_at
        else:
            self._note_age(mailbox, row.message_id, is_added=False)
            is_pending, is_leased = row.status in MESSAGE_PENDING, row.status == LEASED
            _note(self._delayed, mailbox, row.message_id, row.posted_at if row.status == DELAYED else None)
            _note(self._waiting, mailbox, row.message_id, row.posted_at if is_pending else None)
            _note(self._leased, mailbox, row.message_id, row.lease_until if is_leased else None)
            key, held_since = row.key, row.handed_at if is_leased else None
            if self._held_since.get(key) != held_since:
                self._held_since.pop(key, None)
                if held_since is not None:
                    self._held_since[key] = held_since
        self._note_age(mailbox, row.message_id, is_added=True)
        self._pending += len(self._waiting.get(mailbox, ())) - depth
        self._move(mailbox, before)
        if len(self._final) > FINAL_MESSAGES:
            self._forget(next(iter(self._final)))
        if row.request_id is not None:
            self._handed.note(mailbox, row.request_id, row.message_id)

    def _note_age(self, mailbox: Mailbox, message_id: str, *, is_added: bool) -> None:
        """Add a pending message to `_by_age` with the status that it has in the other indexes, or remove it."""
        posted_at = self._waiting.get(mailbox, {}).get(message_id)
        if posted_at is not None:
            status = LEASED if message_id in self._leased.get(mailbox, ()) else UNREAD
            place = _age_place(mailbox, status) + posted_at.to_bytes(8, "big") + message_id.encode()
            (self._by_age.add if is_added else self._by_age.remove)(place)

    def _keep(self, row: MessageRow) -> None:
        key, mailbox = row.key, (row.realm, row.recipient)
        self._kept.setdefault(mailbox, {})[row.message_id] = None
        if row.in_reply_to is not None:
            asked = f"{row.realm}/{row.recipient}/{row.in_reply_to}"
            self._replies.setdefault(asked, {})[row.message_id] = None
        if row.replay_of is not None:
            repeated = f"{row.realm}/{row.recipient}/{row.replay_of}"
            self._replays.setdefault(repeated, {})[row.message_id] = None
        if row.from_task is not None:
            self._of_task.setdefault(row.from_task, {})[key] = None
        self._final.pop(key, None)
        if row.ended_at is None:
            _drop(self._dead, mailbox, row.message_id)  # the id may be used again
            return
        if row.status == DEAD:
            self._dead.setdefault(mailbox, {})[row.message_id] = row.ended_at or 0
        self._final[key] = f"{row.in_reply_to or ''}/{row.replay_of or ''}/{row.from_task or ''}"

    def _forget(self, final: str) -> None:
        """Forget a final message, given by its key."""
        asked, repeated, task_id = self._final.pop(final).split("/")
        realm, recipient, message_id = final.split("/")  # names contain no slash
        _drop(self._kept, (realm, recipient), message_id)
        before = self._place((realm, recipient))
        _drop(self._dead, (realm, recipient), message_id)
        self._move((realm, recipient), before)
        if asked:
            _drop(self._replies, f"{realm}/{recipient}/{asked}", message_id)
        if repeated:
            _drop(self._replays, f"{realm}/{recipient}/{repeated}", message_id)
        if task_id:
            _drop(self._of_task, task_id, final)


def _drop(ids: dict[K, dict[str, V]], key: K, message_id: str) -> None:
    """Remove a message from those of a key, and the key with its last message. Ignores an unknown one."""
    if key in ids:
        ids[key].pop(message_id, None)
        if not ids[key]:
            del ids[key]


def _age_place(mailbox: Mailbox, status: str) -> bytes:
    """Return what the places of a mailbox's messages with a status begin with. Then come age and id."""
    return "\0".join((*mailbox, status, "")).encode()


def _note(times: dict[Mailbox, dict[str, int]], mailbox: Mailbox, message_id: str, time_us: int | None) -> None:
    """Set the time of a message among those of its mailbox, or remove the message if the time is None."""
    if time_us is not None:
        times.setdefault(mailbox, {})[message_id] = time_us
    elif mailbox in times:
        times[mailbox].pop(message_id, None)
        if not times[mailbox]:
            del times[mailbox]
