"""Compares what followers of a mailbox's stream saw with what was promised. Pure, as `delivery_checks`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.faults.prove.comparison import DUPLICATE, LOST, OUT_OF_ORDER, Finding
from tests.faults.prove.delivery_checks import Key, histories_of
from tests.faults.prove.delivery_notes import Delivery, Seen
from tests.faults.prove.oracle import Note


def check_followers(
    notes: Sequence[Delivery],
    acked: Sequence[Note],
    offsets: Mapping[Key, int],
    *,
    is_at_rest: bool = True,
) -> list[Finding]:
    """Return all that is not as it was promised to a follower.

    Args:
        notes: All that the clients saw.
        acked: The notes of messages that were acknowledged to their senders.
        offsets: The place in the log of each posted message.
        is_at_rest: False: what was not seen yet may still come.
    """
    found: list[Finding] = []
    by_follower: defaultdict[tuple[str, str], list[Seen]] = defaultdict(list)
    for note in notes:
        if isinstance(note, Seen):
            by_follower[note.mailbox, note.follower].append(note)
    for (mailbox, follower), seen in by_follower.items():
        found += _in_order(follower, seen, offsets)
        ids = {note.id for note in acked if note.stream == mailbox}
        found += _gaps(mailbox, follower, seen, ids, notes, offsets, is_at_rest=is_at_rest)
    return found


def _in_order(follower: str, seen: Sequence[Seen], offsets: Mapping[Key, int]) -> Iterator[Finding]:
    """Each message comes once, in the order of posting, and so do the events' ids."""
    ids: set[str] = set()
    place, offset = 0, -1
    for one in seen:
        what = f"{follower}: {one.id} (event {one.place})"
        if one.id in ids:
            yield Finding(DUPLICATE, f"{what} came twice")
        elif int(one.place) <= place or offsets.get((one.mailbox, one.id), offset + 1) <= offset:
            yield Finding(OUT_OF_ORDER, f"{what} came after event {place}")
        ids.add(one.id)
        place, offset = int(one.place), offsets.get((one.mailbox, one.id), offset)


def _gaps(
    mailbox: str,
    follower: str,
    seen: Sequence[Seen],
    acked: set[str],
    notes: Sequence[Delivery],
    offsets: Mapping[Key, int],
    *,
    is_at_rest: bool,
) -> Iterator[Finding]:
    """A message that did not come was taken before the follower got to it."""
    histories = histories_of(notes)
    came = {one.id for one in seen}
    for one in sorted(acked - came):
        offset = offsets.get((mailbox, one))
        later = [
            event.at for event in seen if offset is not None and offsets.get((mailbox, event.id), -1) > offset
        ]
        history = histories.get((mailbox, one))
        # A message is also gone when it is dead, and nobody sees when that happens.
        taken = [taker.sent for taker in history.taken] if history else []
        taken += [holding.ended for holding in history.holdings] if history and not taken else []
        if not taken and (later or is_at_rest):
            yield Finding(LOST, f"{follower}: {mailbox} {one} never came, and nobody has taken it")
        elif later and taken and min(taken) > min(later):
            yield Finding(LOST, f"{follower}: {mailbox} {one} never came, and was there when a later one came")
