"""The records that follow from a settled record, as the reactor derives them, without Kafka."""

from __future__ import annotations

from connectors.hub.reactor.derived_records import cause_of, derived_records
from schemas.effects.following import GetRow, Related
from schemas.fold.settled import Settled
from schemas.wire.record import OutgoingRecord, Record


def follows(
    record: Record, get: GetRow, settled: Settled | str | None = None, related: Related = lambda *_: ()
) -> list[OutgoingRecord]:
    """Return the records that follow. `settled` has the verdict, if rules may ask for it, or is the verdict."""
    cause = cause_of(record, get, related)
    if isinstance(settled, Settled) and cause is not None:
        cause.verdict, cause.reason, cause.why = settled.verdict, settled.reason, settled.why
    elif isinstance(settled, str) and cause is not None:
        cause.verdict = settled
    return [] if cause is None else derived_records(cause, lambda _: None)


def needs_verdict(record: Record, get: GetRow) -> bool:
    """Return whether a rule asks for the verdict on a record."""
    cause, asked = cause_of(record, get, lambda *_: ()), list[object]()
    if cause is not None:
        derived_records(cause, asked.append)
    return bool(asked)
