"""The result of the fold for one record: its verdict, and the rows of views that it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from schemas.fold.view_rows import Row
from schemas.wire.record import Envelope
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED, Verdict

# Incremented when the rules change so that a record could get another verdict, entry or row.
FOLD_VERSION: Final = 13


class Change(msgspec.Struct, frozen=True, gc=False):
    """One row of a view, as it is after the record. `row` is `None` if the record removes the row.

    `view` is the name of the view; `key` identifies the row in it.
    """

    view: str
    key: str
    row: Row | None


Rows = Callable[[], tuple[Change, ...]]
"""Returns the changes of a stream's rows, as they are when it is called."""


def changed(row: Row) -> Change:
    """Return the `Change` that writes `row` to its view, for the argument `changes` of `accepted`.

    Nothing is written yet: the runner writes the changes of accepted records to the views.
    """
    return Change(row.VIEW, row.key, row)


class AppliedChange(msgspec.Struct, frozen=True, gc=False):
    """A `Change` with the Kafka offset of the record that made it, as the ledger and view tables store it."""

    view: str
    key: str
    offset: int
    row: Row | None


class Settled(msgspec.Struct, frozen=True, gc=False):
    """The result of `settle` for one record.

    Attributes:
        verdict: whether the record is accepted, a duplicate or rejected.
        stream_kind: the kind of the record's stream.
        stream_id: the name of the record's stream.
        reason: the reason of a rejection, a word of `trunkline_agent.wire.verdicts`.
        why: an explanation of the rejection in a few words. It quotes nothing of the input.
        late: whether the record is accepted although a higher seq was settled before it.
        changes: the rows of views that the record changes.
        status_after: the status of the stream after the record, or `None` if it has none.
        seq: the `seq` of the body, if it is an integer.
        sent_at: the `timestamp` of the body, if it is a valid time.
        masked: the part that must not be shown (`detail`, `data.auth_token` or `value` as a whole), or `None`.
        shown: the bytes to show instead of the value if `masked` is set.
        envelope: the headers of the record, or `None` if they are invalid.
        rows: returns the changed rows, if `settle` was asked to leave them to the caller. `changes` is then
            empty.
    """

    verdict: Verdict
    stream_kind: str
    stream_id: str
    reason: str | None = None
    why: str | None = None
    late: bool = False
    changes: tuple[Change, ...] = ()
    status_after: str | None = None
    seq: int | None = None
    sent_at: str | None = None
    masked: str | None = None
    shown: bytes | None = None
    envelope: Envelope | None = None
    rows: Rows | None = None


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The decision on one record by the fold of its stream's kind: verdict, reason and changed rows.

    `settle` turns it into a `Settled`, whose attributes of the same names it has.
    """

    verdict: Verdict
    reason: str | None = None
    why: str | None = None
    late: bool = False
    changes: tuple[Change, ...] = ()
    status_after: str | None = None
    rows: Rows | None = None


def accepted(
    status: str | None, changes: tuple[Change, ...] = (), *, late: bool = False, rows: Rows | None = None
) -> Outcome:
    """Return the outcome of an accepted record.

    Args:
        status: the status of the stream after the record, or `None` if this kind of stream has none.
        changes: the rows of views that the record changes.
        late: whether a higher seq was accepted before this record.
        rows: returns the changes instead of `changes`, for a kind whose every record changes the same rows. A
            runner that settles many records calls it for the last accepted one alone.
    """
    return Outcome(ACCEPTED, None, None, late, changes, status, rows)


def duplicate(status: str | None) -> Outcome:
    """Return the outcome of a record that was accepted before with the same content. It changes nothing.

    `status` is the status of the stream, or `None` if this kind of stream has none.
    """
    return Outcome(DUPLICATE, status_after=status)


def rejected(reason: str, why: str, status: str | None = None) -> Outcome:
    """Return the outcome of a rejected record.

    Args:
        reason: a word of `trunkline_agent.wire.verdicts`, such as `bad_signature`.
        why: an explanation in a few words for the sender. It must not quote the input, which may be secret.
        status: the status of the stream, or `None` if it has none.
    """
    return Outcome(REJECTED, reason, why, status_after=status)
