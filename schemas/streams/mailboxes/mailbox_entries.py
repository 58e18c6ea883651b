"""The entries of the stream `mailbox/<realm>/<agent>`: pending messages, message ids, leases and requests.

Entries:
`m/<priority>/<posted_at>/<message_id>`: one pending message without its body. The priority is a digit and the
time 16 hex digits. The order of the keys is therefore the order in which messages are handed out.
`d/<message_id>`: one delayed message, which is handed out to nobody.
`id/<3 or more hex digits>`: the ids with this prefix of their SHA-256 that are pending or were posted in the
last week. An entry with many ids is split by the next digit, and is empty then.
`last`: the time at which the newest message was posted, 8 bytes.
`leases`: the ends of the leases.
`handed`: the times of the last minute at which leases with a rate handed out messages.
`closed`: exists if the mailbox is closed.
`size`: how many messages there are, with the bytes of their bodies.
`limits`: the limits of the mailbox's own, if it has any.
`requests`, `requests/message`: the newest requests about the mailbox, and about single messages.
`requests/<2 hex digits>`, `requests/message/<2 hex digits>`: older requests (`schemas.fold.memories`).
They are read by key alone: the first of the two prefixes begins the keys of both.

A message with a final status has no entry of its own. Messages are read by key, or in order as far as needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from schemas.fold.entries import Entries, StructEntries
from schemas.fold.memories import RequestChunk, RequestChunks, RequestMemory
from schemas.fold.settled import Change
from schemas.streams.mailboxes.mailbox_bodies import MailboxSize, OwnLimits
from schemas.streams.mailboxes.message import DELAYED, MAILBOX_VIEW, PRIORITIES, UNREAD
from schemas.streams.mailboxes.pending_message import (
    CLOCK_AHEAD_US,
    PendingMessage,
    is_lease_held,
    is_of_a_wrong_clock,
)

ENTRY_VERSION: Final = 1
# A posting writes all ids of an entry. With fewer together, a micro-batch of a deep mailbox changes entries in
# more shelves of the view tables (decision 0013).
IDS_TOGETHER: Final = 64
_LEAST_DIGITS: Final = 3
ID_KEPT_US: Final = 7 * 24 * 3600 * 1_000_000
# Requests about the whole mailbox (claim, lease, clear) and about single messages (ack, read, ...) have
# separate memories. Otherwise a few hundred acks would displace a claim that may still be repeated.
OF_MAILBOX: Final = "requests"
OF_MESSAGE: Final = "requests/message"
_PENDING: Final = "m/"
LAST: Final = "last"
_CLOSED: Final = "closed"
_MINUTE_US: Final = 60_000_000
_DIGITS: Final = {priority: digit for digit, priority in enumerate(PRIORITIES)}


class KnownId(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The data that the mailbox remembers of a message id, to recognise a message that is posted again.

    `digest` is the digest of the message's content, `posted_at` the column of its row in microseconds, and
    `priority` a digit, 0 for the highest.
    """

    digest: bytes
    posted_at: int
    priority: int


class Leases(msgspec.Struct, array_like=True, gc=False):
    """The current leases of a mailbox: how many leased messages there are for each end of a lease.

    `ends` maps the end (microseconds since 1970 UTC) to the number of messages. `unused` has the place of a
    field of fold version 8, so that entries of that version can be read.
    """

    version: int = ENTRY_VERSION
    unused: str = ""
    ends: dict[int, int] = {}

    def begin(self, until_us: int) -> None:
        """Count the lease of one message, which ends at `until_us` (microseconds since 1970 UTC).

        The entry of the stream does not change until `MailboxEntries.put_leases` writes it.
        """
        self.ends[until_us] = self.ends.get(until_us, 0) + 1

    def end(self, message: PendingMessage) -> None:
        """Remove the lease of `message` from the count, if it has one. Does not change `message`."""
        until_us = message.lease_until
        if until_us is None:
            return
        left = self.ends.get(until_us, 0) - 1
        if left > 0:
            self.ends[until_us] = left
        else:
            self.ends.pop(until_us, None)

    @property
    def held(self) -> int:
        """The number of messages that `ends` counts as leased."""
        return sum(self.ends.values())


class _Shard(msgspec.Struct, array_like=True, gc=False):
    version: int
    ids: dict[str, KnownId]
    is_split: bool = False


class _Handed(msgspec.Struct, array_like=True, gc=False):
    version: int
    moments: list[int]


class _Requests(msgspec.Struct, array_like=True, gc=False):
    version: int
    memory: RequestMemory


_MESSAGES: Final = StructEntries(_PENDING, PendingMessage)
_DELAYED: Final = StructEntries("d/", PendingMessage)
_IDS: Final = StructEntries("id/", _Shard)
_LEASES: Final = StructEntries("leases", Leases)
_HANDED: Final = StructEntries("handed", _Handed)
_SIZE: Final = StructEntries("size", MailboxSize)
_LIMITS: Final = StructEntries("limits", OwnLimits)
_REQUESTS: Final = {of: StructEntries(of, _Requests) for of in (OF_MAILBOX, OF_MESSAGE)}
_OLDER_REQUESTS: Final = {of: StructEntries(f"{of}/", RequestChunk) for of in _REQUESTS}


class MailboxEntries:
    """Typed access to the entries of a mailbox, while the fold settles one of its records.

    All writes are pending in `entries` until the record is accepted.

    Args:
        mailbox: the name of the stream, `<realm>/<agent>`.
        entries: the entries of the stream.
        now_us: the append time of the record, in microseconds since 1970 UTC.
    """

    def __init__(self, mailbox: str, entries: Entries, now_us: int) -> None:
        self.realm, _, self.recipient = mailbox.partition("/")
        self.now_us = now_us
        self._entries = entries
        self._size: MailboxSize | None = None

    def next_moment(self) -> int:
        """Choose the posting time of a new message, remember it as the newest, and return it (microseconds).

        It is the record's append time, or one microsecond after the newest message if that is later. Kafka
        gives all records of a batch the same time, but messages must be handed out in the order of posting. A
        newest message of a wrong clock counts no more.
        """
        raw = self._entries.get(LAST)
        newest = 0 if raw is None else int.from_bytes(raw, "big")
        moment = self.now_us if is_of_a_wrong_clock(newest, self.now_us) else max(self.now_us, newest + 1)
        self._entries.put(LAST, moment.to_bytes(8, "big"))
        return moment

    def known(self, message_id: str) -> KnownId | None:
        """Return the data about a message id, or `None` if no message with this id is known.

        An id is known while its message has no final status, and for a week after `posted_at`.
        """
        found = self._shard(message_id)[1].ids.get(message_id)
        return found if found is not None and self._is_kept(message_id, found) else None

    def pending(self, message_id: str) -> PendingMessage | None:
        """Return the message with this id if it is pending (unread or leased), else `None`."""
        known = self._shard(message_id)[1].ids.get(message_id)
        return None if known is None else _MESSAGES.read(self._entries, _message_key(message_id, known))

    def delayed(self, message_id: str) -> PendingMessage | None:
        """Return the message with this id if it is delayed, else `None`."""
        return _DELAYED.read(self._entries, message_id)

    def all_delayed(self) -> Iterator[PendingMessage]:
        """Iterate over the delayed messages in the order of their ids. They may be removed meanwhile."""
        for key in self._entries.with_prefix(_DELAYED.key):
            message = _DELAYED.read(self._entries, key.removeprefix(_DELAYED.key))
            if message is not None:
                yield message

    def in_order(self) -> Iterator[PendingMessage]:
        """Iterate over the pending messages in the order in which they are handed out.

        That is by priority, then by posting time. Messages may be changed or removed during the iteration.
        """
        for key in self._entries.with_prefix(_PENDING):
            message = _MESSAGES.read(self._entries, key.removeprefix(_PENDING))
            if message is not None:
                yield message

    def of_these(self, message_ids: Sequence[str]) -> list[PendingMessage]:
        """Return those of the messages `message_ids` that are pending, in the order for handing them out.

        Ids of unknown messages, and of messages with a final status, are ignored. A repeated id counts once.
        """
        found = [
            message for message_id in set(message_ids) if (message := self.pending(message_id)) is not None
        ]
        return sorted(found, key=_key_of)

    def add(self, message: PendingMessage, digest: bytes) -> None:
        """Add a new message and remember its id with `digest`, the digest of its content.

        Some older ids are forgotten: those in the same entry that are older than a week and whose message has
        a final status. The week of an id that came under a wrong clock begins now.
        """
        self._resize(1, message.body_bytes)
        message_id = message.message_id
        at, shard = self._shard(message_id)
        shard.ids[message_id] = KnownId(digest, message.posted_at, _DIGITS[message.priority])
        self.put(message)
        latest = self.now_us + CLOCK_AHEAD_US
        shard.ids = {
            known_id: known if known.posted_at <= latest else self._healed(known_id, known)
            for known_id, known in shard.ids.items()
            if self._is_kept(known_id, known)
        }
        if len(shard.ids) > IDS_TOGETHER:
            parts: dict[str, dict[str, KnownId]] = {}
            for known_id, known in shard.ids.items():
                parts.setdefault(_hash_of(known_id)[: len(at) + 1], {})[known_id] = known
            for part, ids in parts.items():
                _IDS.write(self._entries, _Shard(ENTRY_VERSION, ids), part)
            shard.ids, shard.is_split = {}, True
        _IDS.write(self._entries, shard, at)

    def put(self, message: PendingMessage) -> None:
        """Write a message whose fields were changed.

        `message_id`, `priority` and `posted_at` must be unchanged, because they form the key of its entry. Only
        `deliver` ends the status `delayed`.
        """
        if message.status == DELAYED:
            _DELAYED.write(self._entries, message, message.message_id)
        else:
            _MESSAGES.write(self._entries, message, _key_of(message))

    def deliver(self, message: PendingMessage) -> None:
        """Put a delayed message into the mailbox, as the newest one, with the status `unread`."""
        _DELAYED.delete(self._entries, message.message_id)
        message.status, message.posted_at = UNREAD, self.next_moment()
        self.put(message)
        at, shard = self._shard(message.message_id)
        known = shard.ids[message.message_id]
        shard.ids[message.message_id] = KnownId(known.digest, message.posted_at, known.priority)
        _IDS.write(self._entries, shard, at)

    def remove(self, message: PendingMessage) -> None:
        """Remove a message that has reached a final status. Its id stays known for a week after `posted_at`."""
        self._resize(-1, -message.body_bytes)
        if message.status == DELAYED:
            _DELAYED.delete(self._entries, message.message_id)
        else:
            _MESSAGES.delete(self._entries, _key_of(message))
        if is_of_a_wrong_clock(message.posted_at, self.now_us):
            at, shard = self._shard(message.message_id)
            shard.ids[message.message_id] = self._healed(message.message_id, shard.ids[message.message_id])
            _IDS.write(self._entries, shard, at)

    def size(self) -> MailboxSize:
        """Return how many messages have no final status, and the bytes of their bodies. Do not change it."""
        if self._size is None:
            self._size = _SIZE.read(self._entries)
        if self._size is None:
            # The messages of an earlier fold version are counted once. Without `last` there are none.
            is_old = self._entries.get(LAST) is not None
            count = sum(1 for _ in self._entries.with_prefix(_PENDING)) if is_old else 0
            self._size = MailboxSize(ENTRY_VERSION, count)
        return self._size

    def _resize(self, messages: int, body_bytes: int) -> None:
        size = self.size()
        size.messages += messages
        size.body_bytes += body_bytes
        _SIZE.write(self._entries, size)

    @property
    def own_limits(self) -> OwnLimits:
        """The limits of the mailbox's own."""
        return _LIMITS.read(self._entries) or OwnLimits(ENTRY_VERSION)

    def put_limits(self, limits: OwnLimits) -> None:
        """Set the limits of the mailbox's own."""
        _LIMITS.write(self._entries, limits)

    def leases(self) -> Leases:
        """Return a copy of the leases that have not expired. Write changes back with `put_leases`."""
        known = _LEASES.read(self._entries)
        ends = {} if known is None else known.ends
        return Leases(ends={until: n for until, n in ends.items() if is_lease_held(until, self.now_us)})

    def put_leases(self, leases: Leases) -> None:
        """Write the leases of the mailbox if they have changed. Delete the entry if there is no lease."""
        known = _LEASES.read(self._entries)
        if leases.ends and (known is None or known.ends != leases.ends):
            _LEASES.write(self._entries, leases)
        elif not leases.ends and known is not None:
            _LEASES.delete(self._entries)

    @property
    def is_closed(self) -> bool:
        """True if the mailbox is closed, so that no message may be posted or leased."""
        return is_closed_mailbox(self._entries)

    def put_closed(self, *, is_closed: bool) -> None:
        """Close the mailbox for postings and leases if `is_closed` is true, else open it again."""
        if is_closed:
            self._entries.put(_CLOSED, bytes([ENTRY_VERSION]))
        elif self.is_closed:
            self._entries.delete(_CLOSED)

    def handed_lately(self) -> list[int]:
        """Return the times in the last minute at which leases with a rate limit handed out messages.

        Each message has one element, in microseconds since 1970 UTC.
        """
        known = _HANDED.read(self._entries)
        moments = known.moments if known else ()
        return [at for at in moments if self.now_us - _MINUTE_US < at <= self.now_us + CLOCK_AHEAD_US]

    def put_handed(self, moments: list[int]) -> None:
        """Replace the times that `handed_lately` returns: one per message, in microseconds since 1970 UTC."""
        _HANDED.write(self._entries, _Handed(ENTRY_VERSION, moments))

    def requests(self, of: str) -> RequestMemory:
        """Return one of the mailbox's two memories of accepted requests. It is empty if none was stored.

        `of` is `OF_MAILBOX` for requests about the whole mailbox, or `OF_MESSAGE` for those about one message.
        After a change, the caller stores the memory with `put_requests`.
        """
        known = _REQUESTS[of].read(self._entries)
        return RequestMemory() if known is None else known.memory

    @staticmethod
    def older_requests(of: str) -> RequestChunks:
        """Return where one of the two memories of requests has its older ones."""
        return _OLDER_REQUESTS[of]

    def put_requests(self, of: str, memory: RequestMemory) -> None:
        """Write the memory of accepted requests that `requests` returned for the same `of`."""
        _REQUESTS[of].write(self._entries, _Requests(ENTRY_VERSION, memory))

    def change(self, message: PendingMessage, status: str | None = None) -> Change:
        """Return the change that writes the message's row to the view `mailbox`.

        `status` is the final status that the message has reached, or `None` if it has none.
        """
        row = message.row(self.realm, self.recipient, status, self.now_us)
        return Change(MAILBOX_VIEW, f"{self.realm}/{self.recipient}/{message.message_id}", row)

    def _shard(self, message_id: str) -> tuple[str, _Shard]:
        """Return the entry that a message id belongs to, and the digits in its key."""
        digits = _hash_of(message_id)
        for length in range(_LEAST_DIGITS, len(digits)):
            found = _IDS.read(self._entries, digits[:length])
            if found is None or not found.is_split:
                return digits[:length], found or _Shard(ENTRY_VERSION, {})
        raise LookupError(f"the entry of {digits} is split to its last digit")

    def _healed(self, message_id: str, known: KnownId) -> KnownId:
        """Return what is known of an id, as of now if its message has ended and came under a wrong clock."""
        if not is_of_a_wrong_clock(known.posted_at, self.now_us) or self.delayed(message_id) is not None:
            return known
        if _MESSAGES.read(self._entries, _message_key(message_id, known)) is not None:
            return known
        return KnownId(known.digest, self.now_us, known.priority)

    def _is_kept(self, message_id: str, known: KnownId) -> bool:
        # Two messages with one id would share a row, so the id of one without a final status is not forgotten.
        if self.now_us - known.posted_at <= ID_KEPT_US or self.delayed(message_id) is not None:
            return True
        return _MESSAGES.read(self._entries, _message_key(message_id, known)) is not None


def is_closed_mailbox(entries: Entries) -> bool:
    """Return whether a mailbox is closed, so that no message may be posted or leased.

    `entries` is the state of the stream `mailbox/<realm>/<agent>`. A mailbox without entries is open.
    """
    return entries.get(_CLOSED) is not None


def _hash_of(message_id: str) -> str:
    return hashlib.sha256(message_id.encode("ascii")).hexdigest()


def _message_key(message_id: str, known: KnownId) -> str:
    return f"{known.priority}/{known.posted_at:016x}/{message_id}"


def _key_of(message: PendingMessage) -> str:
    return f"{_DIGITS[message.priority]}/{message.posted_at:016x}/{message.message_id}"
