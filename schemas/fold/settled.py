"""What the fold says of one record, and the registry rows it changes."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.fold.view_rows import Row
from schemas.wire.record import Envelope
from schemas.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED, Verdict

# 7: a header's name ends at its first NUL.
FOLD_VERSION: Final = 8


class Change(msgspec.Struct, frozen=True, gc=False):
    """One row of one view after this record; `row` None removes it."""

    view: str
    key: str
    row: Row | None


class AppliedChange(msgspec.Struct, frozen=True, gc=False):
    """A change and the offset of the record that made it: what the ledger keeps and a view table shows."""

    view: str
    key: str
    offset: int
    row: Row | None


class Settled(msgspec.Struct, frozen=True, gc=False):
    """The fold's answer. `why` explains a rejection in a few words and quotes nothing of the input.

    `late`: accepted, but a later seq was settled before it. `masked` names what must not be shown
    (`detail`, `data.auth_token`, or `value` as a whole); `shown` are then the bytes to show instead.
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


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What a stream's own fold decides; `settle` makes a `Settled` of it."""

    verdict: Verdict
    reason: str | None = None
    why: str | None = None
    late: bool = False
    changes: tuple[Change, ...] = ()
    status_after: str | None = None


def accepted(status: str | None, changes: tuple[Change, ...] = (), *, late: bool = False) -> Outcome:
    """The record counts; `status` is the stream's after it."""
    return Outcome(ACCEPTED, late=late, changes=changes, status_after=status)


def duplicate(status: str | None) -> Outcome:
    """The record was settled before with the same content; nothing changes."""
    return Outcome(DUPLICATE, status_after=status)


def rejected(reason: str, why: str, status: str | None = None) -> Outcome:
    """The record does not count, for `reason`; `why` says it in words."""
    return Outcome(REJECTED, reason, why, status_after=status)
