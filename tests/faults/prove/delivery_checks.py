"""Compares what consumers and askers saw with what was promised to them. Pure: plain values in, findings out.

A *holding* is one lease of one message. It begins at its deadline less its duration, both of which the consumer
was told. Where its end is known only roughly, `ends` is the earliest and `ended` the latest possible moment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from tests.faults.prove.comparison import CHANGED, DUPLICATE, LOST, MISBEHAVED, Finding, Mail
from tests.faults.prove.delivery_notes import (
    ACK,
    EXTEND,
    EXTEND_S,
    NACK,
    Answered,
    Delivery,
    Ending,
    Got,
    Taking,
)

AGAIN_WITHIN_S: Final = 2.0
LEASE_RAN_OUT: Final = "the lease ran out"
# The MCP door says milliseconds, and so does Kafka.
_SAME_S: Final = 0.002
# Longer than a request that waits may last beyond its time, where nothing is slow.
_SLOW_S: Final = 1.0
_FOR_EVER: Final = float("inf")

Key = tuple[str, str]
"""A mailbox and the id of a message in it."""


class Outage(NamedTuple):
    """A time in which a door of a gateway (its URL), or each of them (""), may not answer as usual."""

    gateway: str
    since: float
    until: float


@dataclass
class Holding:
    """One lease of one message, as its holder saw it."""

    lease: str
    attempt: int
    began: float
    ends: float
    ended: float
    reason: str = LEASE_RAN_OUT


class Taker(NamedTuple):
    """A message was taken for good: by whom, and between which moments."""

    by: str
    sent: float
    answered: float


@dataclass
class History:
    """All that clients saw of one message."""

    holdings: list[Holding] = field(default_factory=list)
    taken: list[Taker] = field(default_factory=list)


def check_deliveries(
    notes: Sequence[Delivery],
    mail: Mapping[Key, Mail],
    mailboxes: Sequence[str],
    *,
    attempts_most: int,
    outages: Sequence[Outage] = (),
    is_at_rest: bool = True,
) -> list[Finding]:
    """Return all that is not as it was promised.

    Args:
        notes: All that the clients saw.
        mail: The messages in the end.
        mailboxes: The mailboxes whose consumers took part to the end.
        attempts_most: How often a message may be handed out before it is dead.
        outages: Times in which nobody can be held to the two seconds.
        is_at_rest: False: what is not there yet may still come.
    """
    histories = histories_of(notes)
    takings = [note for note in notes if isinstance(note, Taking)]
    found: list[Finding] = [*_refused_in_time(notes)]
    for key, history in histories.items():
        found += _two_holders(key, history)
        found += _again_after_the_end(key, history)
        found += _attempts(key, history, takings, attempts_most)
        found += _late(key, history, takings, attempts_most, outages, notes)
    if is_at_rest:
        for key, one in mail.items():
            if key[0] in mailboxes:
                found += _final_state(one, histories.get(key, History()), attempts_most)
        found += _unanswered(notes)
    return found


def histories_of(notes: Sequence[Delivery]) -> dict[Key, History]:
    """Return what clients saw of each message."""
    found: defaultdict[Key, History] = defaultdict(History)
    ends: defaultdict[tuple[str, str, str], list[Ending]] = defaultdict(list)
    for note in notes:
        if isinstance(note, Ending) and note.is_done:
            ends[note.mailbox, note.lease, note.id].append(note)
    for note in notes:
        if isinstance(note, Answered) and note.reply:
            found[note.mailbox, note.reply].taken.append(Taker(f"question {note.id}", note.sent, note.answered))
        elif isinstance(note, Taking):
            for got in note.got:
                _add(found[note.mailbox, got.id], note, got, ends)
    for history in found.values():
        history.holdings.sort(key=lambda holding: holding.began)
    return dict(found)


def _add(
    history: History, taking: Taking, got: Got, ends: Mapping[tuple[str, str, str], Sequence[Ending]]
) -> None:
    if not taking.lease_s:
        history.taken.append(Taker(f"drain {taking.request}", taking.sent, taking.answered))
        return
    lease = taking.lease_id
    if any((one.lease, one.attempt) == (lease, got.attempt) for one in history.holdings):
        return  # the same request again
    holding = Holding(lease, got.attempt, got.deadline - taking.lease_s, got.deadline, got.deadline)
    history.holdings.append(holding)
    for end in sorted(ends.get((taking.mailbox, taking.lease_id, got.id), ()), key=lambda end: end.sent):
        if end.how == EXTEND:
            holding.ends, holding.ended = end.sent + EXTEND_S, end.answered + EXTEND_S
        elif end.how == NACK:
            holding.ends, holding.ended, holding.reason = end.sent, end.answered, end.reason
        elif end.how == ACK:
            holding.ends, holding.ended = end.sent, end.answered
            history.taken.append(Taker(f"lease {lease}", end.sent, end.answered))


def _what(key: Key) -> str:
    return f"{key[0]} {key[1]}"


def _two_holders(key: Key, history: History) -> Iterator[Finding]:
    """No message is leased to two holders at once, and none is taken for good while it is leased."""
    for one, other in pairwise(history.holdings):
        if other.began < one.ends - _SAME_S:
            early_s = one.ends - other.began
            yield Finding(DUPLICATE, f"{_what(key)} was leased to another {early_s:.3f} s before a lease ended")
    for taken in history.taken:
        for holding in history.holdings:
            is_own = taken.by == f"lease {holding.lease}"
            if not is_own and holding.began <= taken.sent and taken.answered < holding.ends - _SAME_S:
                yield Finding(DUPLICATE, f"{_what(key)} was leased and was taken by {taken.by}")


def _again_after_the_end(key: Key, history: History) -> Iterator[Finding]:
    """A message that was taken for good is not handed out again. A repeated question has the same reply."""
    by = {taken.by for taken in history.taken}
    if len(by) > 1:
        yield Finding(DUPLICATE, f"{_what(key)} was taken for good {len(by)} times: {', '.join(sorted(by))}")
    for taken in history.taken:
        for holding in history.holdings:
            if holding.began > taken.answered + _SAME_S:
                yield Finding(DUPLICATE, f"{_what(key)} was leased again after it was taken by {taken.by}")


def _attempts(key: Key, history: History, takings: Sequence[Taking], most: int) -> Iterator[Finding]:
    """Attempts are counted by one. One that nobody saw belongs to a request that was interrupted."""
    before, since = 0, 0.0
    for holding in history.holdings:
        if holding.attempt <= before:
            yield Finding(DUPLICATE, f"{_what(key)} was handed out twice as attempt {holding.attempt}")
        elif holding.attempt > before + 1 and not _interrupted(key[0], takings, since, holding.began):
            yield Finding(LOST, f"{_what(key)}: nobody got its attempt {before + 1}")
        before, since = holding.attempt, holding.began
    if before > most:
        yield Finding(MISBEHAVED, f"{_what(key)} was handed out {before} times, at most {most}")


def _interrupted(mailbox: str, takings: Sequence[Taking], since: float, until: float) -> bool:
    """True if somebody may have had a message in this time without knowing it."""
    return any(
        one.mailbox == mailbox and one.sends > 1 and one.sent <= until and one.answered + one.lease_s >= since
        for one in takings
    )


def _late(
    key: Key,
    history: History,
    takings: Sequence[Taking],
    most: int,
    outages: Sequence[Outage],
    notes: Sequence[Delivery],
) -> Iterator[Finding]:
    """A message that is free again goes to the next that asks, and within two seconds to one that waits."""
    asked = Counter(one.request for one in takings)
    # A request that is repeated gets what it got before, and nothing else.
    mine = [one for one in takings if one.mailbox == key[0] and asked[one.request] == 1]
    for number, holding in enumerate(history.holdings):
        later = [one.began for one in history.holdings[number + 1 :]]
        later += [one.sent for one in history.taken if one.answered >= holding.began]
        next_at, due = min(later, default=_FOR_EVER), holding.ended + AGAIN_WITHIN_S
        if holding.attempt >= most or next_at <= due:
            continue
        for taking in mine:
            has_room = len(taking.got) < taking.limit
            asked_after = due <= taking.sent and taking.answered <= next_at and has_room
            waited = taking.sent <= holding.ended and due <= taking.answered and taking.wait_s > 0
            if taking.sends > 1 or not (asked_after or waited):
                continue
            if _interrupted(key[0], takings, holding.began, taking.answered):
                continue
            if not asked_after and not _is_well(taking.gateway, holding.ended, due, outages, notes):
                continue
            when = "asked after that" if asked_after else "waited"
            yield Finding(
                LOST,
                f"{_what(key)} was free from {holding.ended:.3f} on, and {taking.door} request "
                f"{taking.request}, which {when} ({taking.sent:.3f} to {taking.answered:.3f}), did not get it",
            )
            break


def _is_well(
    gateway: str, since: float, until: float, outages: Sequence[Outage], notes: Sequence[Delivery]
) -> bool:
    """True if no outage was made in this time, and no request took longer than requests do."""
    if any(one.gateway in ("", gateway) and one.since <= until and one.until >= since for one in outages):
        return False
    for note in notes:
        if isinstance(note, Taking | Ending) and note.sent <= until and note.answered >= since:
            wait_s = note.wait_s if isinstance(note, Taking) else 0
            if note.answered - note.sent > wait_s + _SLOW_S:
                return False
    return True


def _refused_in_time(notes: Sequence[Delivery]) -> Iterator[Finding]:
    """The holder of a lease may end or extend it as long as it lasts."""
    until: dict[tuple[str, str, str], float] = {}
    for note in notes:
        if isinstance(note, Taking) and note.lease_s:
            for got in note.got:
                until.setdefault((note.mailbox, note.lease_id, got.id), got.deadline)
        elif isinstance(note, Ending):
            holding = (note.mailbox, note.lease, note.id)
            if not note.is_done and note.answered < until.get(holding, 0.0):
                what = f"{note.mailbox} {note.id}: {note.how} was refused within its lease: {note.refusal}"
                yield Finding(MISBEHAVED, what)
            elif note.is_done and note.how == EXTEND:
                until[holding] = note.sent + EXTEND_S
            elif note.is_done:
                until.pop(holding, None)


def _final_state(mail: Mail, history: History, most: int) -> Iterator[Finding]:
    """In the end each message was taken by somebody who knows it, or is dead after its last attempt."""
    what = _what((mail.stream, mail.id))
    if history.taken and mail.status != "claimed":
        yield Finding(CHANGED, f"{what} was taken by {history.taken[0].by} and is {mail.status}")
    elif mail.status == "claimed" and not history.taken:
        yield Finding(LOST, f"{what} is claimed, and nobody has acknowledged or got it for good")
    elif mail.status == "dead":
        last = next((one for one in history.holdings if one.attempt == most), None)
        reason = LEASE_RAN_OUT if last is None else last.reason or None
        if mail.attempts != most:
            yield Finding(LOST, f"{what} is dead after {mail.attempts} attempts, and has {most}")
        elif mail.last_reason != reason:
            yield Finding(CHANGED, f"{what} is dead because {mail.last_reason!r}, and not {reason!r}")
    elif mail.status != "claimed":
        yield Finding(LOST, f"{what} is {mail.status}, and its consumers did not get it again")


def _unanswered(notes: Sequence[Delivery]) -> Iterator[Finding]:
    """Each question has its reply once: as its answer, or in the mailbox of the asker."""
    acked = {(note.mailbox, note.id) for note in notes if isinstance(note, Ending) and note.is_done}
    replies: defaultdict[Key, set[str]] = defaultdict(set)
    for note in notes:
        if isinstance(note, Answered) and note.reply:
            replies[note.mailbox, note.id].add(note.reply)
        elif isinstance(note, Taking):
            for got in note.got:
                if got.in_reply_to and (not note.lease_s or (note.mailbox, got.id) in acked):
                    replies[note.mailbox, got.in_reply_to].add(got.id)
    for key in {(note.mailbox, note.id): None for note in notes if isinstance(note, Answered)}:
        count = len(replies[key])
        if count != 1:
            kind = DUPLICATE if count else LOST
            yield Finding(kind, f"the asker of {_what(key)} got {count} replies, not one")
