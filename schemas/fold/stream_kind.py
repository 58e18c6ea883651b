"""A kind of stream (its record types, body checks, fold and views), and the input of its fold.

`schemas.streams.kinds` lists all kinds. The checks of a record's form, the views and the reference
documentation are derived from that list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel

from schemas.fold.entries import Entries
from schemas.fold.settled import Outcome
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring
from schemas.wire.record import Envelope, Record


class FoldInput(msgspec.Struct, frozen=True, gc=False):
    """The input of a kind's fold: a record whose body passed its check, and the state of its stream.

    Attributes:
        record: the record as it was read from Kafka.
        envelope: the headers of the record.
        name: the name of the stream, without its kind.
        body: the decoded body.
        entries: the state of the stream.
        keyring: the master keys that open sealed secrets.
        plain: whether the body is canonical JSON without floats, so that `canonical_plain` writes the same
            bytes.
        masked: whether the body contains a token or an unsafe `detail`, which must not reach a view.
    """

    record: Record
    envelope: Envelope
    name: str
    body: dict[str, Any]
    entries: Entries
    keyring: Keyring
    plain: bool
    masked: bool

    @property
    def type(self) -> str:
        """The type of the record, its header `ce_type`."""
        return self.envelope.type

    @property
    def now_us(self) -> int:
        """Kafka's append time of the record, in microseconds since 1970 UTC. The fold has no other clock."""
        return self.record.logged_at_us

    @property
    def sender(self) -> str:
        """The door and the principal that sent the record, as `<door>/<principal>`."""
        return f"{self.envelope.door}/{self.envelope.principal}"


class StreamKind(NamedTuple):
    """A kind of stream: its record types, the check of their bodies, its fold and its views.

    Attributes:
        name: the first part of the stream's key, `<name>/<stream>`.
        models: each record type with the model of its body.
        settle: the fold of one record, whose body passed its model.
        rows: the rows of the kind's views, in the order in which a micro-batch writes the views.
        later_rows: the same for views that are written after the `rows` of all kinds.
        row_of_each_stream: a stream that has entries has a row of at least one of these types. Empty if a
            stream may have entries without a row.
        named_by: the field of a body that must be the stream's name, or a function that returns it. `None` if
            the bodies do not name their stream.
        misnamed: the explanation of the rejection if the body names another stream.
        fast_checks: per record type a check that decides the same as its model in less time.
        foreign_types: record types whose body another program made, so that it names neither its version nor
            its stream.
        checks_bodies: whether `settle` checks the bodies itself, because the stream's name decides on the
            model.
    """

    name: str
    models: Mapping[str, type[BaseModel]]
    settle: Callable[[FoldInput], Outcome]
    row_of_each_stream: tuple[type[Row], ...]
    rows: tuple[type[Row], ...] = ()
    later_rows: tuple[type[Row], ...] = ()
    named_by: str | Callable[[dict[str, Any]], object] | None = None
    misnamed: str = "the body names another stream than the key"
    fast_checks: Mapping[str, Callable[[dict[str, Any]], str | None]] = {}
    foreign_types: frozenset[str] = frozenset()
    checks_bodies: bool = False
