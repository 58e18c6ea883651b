"""The rules about records that follow from a settled one, which each kind of stream declares, and their ids.

A rule is pure. It uses the settled record, its verdict, and rows of the views that include the record's effect.
So the derived records and their ids are the same at every gateway and after every restart, and the fold accepts
each only once. Nothing here appends a record: the reactor of a gateway does.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from schemas.fold.view_rows import Row
from schemas.wire.record import Envelope, Origin, OutgoingRecord, Record
from trunkline_agent.wire.strict_json import MalformedJsonError, decode

R = TypeVar("R", bound=Row)
M = TypeVar("M", bound=BaseModel)
DOOR: Final = "reactor"
BY_REACTOR: Final[Origin] = {"door": DOOR, "principal": "reactor"}
_NAMESPACE: Final = uuid.UUID("5f0c86f1-6c6f-4bb0-9f5e-0d6f3a1c7d52")


def derived_id(cause: str, effect: str) -> str:
    """Return the id of a derived record: a UUID that depends on the two arguments alone.

    Args:
        cause: the id of the record from which the derived record follows.
        effect: the type of the derived record. If one cause has several derived records of a type, add a text
            to the type that differs for each of them.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{cause}/{effect}"))


class GetRow(Protocol):
    """The type of functions that look up one row of the views, such as `LiveView.get`."""

    def __call__(self, row_type: type[R], key: str, /) -> R | None:
        """Return the row of type `row_type` with the key `key`, or None if there is no such row."""


Related = Callable[[type[Row], str], Iterable[str]]
"""The look-up of names by the type of the rows that tell them. Earlier names may be among them.

`related(SessionRow, job)`: the sessions made for a job. `related(SubscriptionRow, subscriber)`: the topics of a
subscriber. `related(ListenerRow, "organism")`: all listeners.
"""


@dataclass
class Cause:
    """A settled record, from which other records may follow.

    Attributes:
        record: the record.
        envelope: its headers.
        kind: the kind of its stream.
        name: the name of its stream.
        get: the look-up of rows, such as `LiveView.get`. The rows include the effect of the record, and may
            include that of later ones.
        related: the look-up of names.
        verdict: the verdict: accepted, duplicate or rejected. `None`: no rule has asked for it yet.
        reason: the reason of a rejection.
        why: the explanation of a rejection.
    """

    record: Record
    envelope: Envelope
    kind: str
    name: str
    get: GetRow
    related: Related
    verdict: str | None = None
    reason: str | None = None
    why: str | None = None

    @property
    def id(self) -> str:
        """The CloudEvents id of the record."""
        return self.envelope.ce_id

    @property
    def record_type(self) -> str:
        """The type of the record."""
        return self.envelope.type

    @cached_property
    def body(self) -> dict[str, Any]:
        """The decoded body of the record. Raises MalformedJsonError if it has none."""
        found: dict[str, Any] = decode(self.record.value or b"")[0]
        return found

    def body_as(self, model: type[M]) -> M | None:
        """Return the body as an instance of its model, or `None` if it is invalid."""
        try:
            return model.model_validate(self.body)
        except (ValidationError, MalformedJsonError):
            return None


class Follows(NamedTuple):
    """A rule: which records follow from a settled record.

    Attributes:
        types: the types of the records from which others may follow.
        derive: returns the records to append. Usually there are none.
        asks: returns whether the rule needs the verdict, which costs a wait. False: nothing follows. `None`:
            the rule never needs it, because the rows say what was accepted.
    """

    types: frozenset[str]
    derive: Callable[[Cause], list[OutgoingRecord]]
    asks: Callable[[Cause], bool] | None = None


class Timer(NamedTuple):
    """The records that a row needs when a moment comes which the row names.

    Attributes:
        row_type: the type of the row.
        stream_of: returns the stream of the records about a row.
        moment_of: returns when a row next needs a record, or `None` for never, given the log's present time.
        record_of: returns this record, given the log's time then, and the look-up of rows.
    """

    row_type: type[Any]
    stream_of: Callable[[Any], str]
    moment_of: Callable[[Any, int], int | None]
    record_of: Callable[[Any, int, GetRow], OutgoingRecord]
