"""A kind of stream (its record types, body checks, fold and views), its life cycle, and the input of its fold.

`schemas.streams.fold` lists all kinds. The checks of a record's form, the views and the reference
documentation are derived from that list.

Each kind declares its own states and transitions in its package: a table from each state to the states that may
follow it. A state that no other state may follow is terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from pydantic import BaseModel

from schemas.fold.entries import Entries
from schemas.fold.settled import Outcome, rejected
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring
from schemas.wire.record import Envelope, Record
from trunkline_agent.wire.verdicts import AFTER_TERMINAL, ILLEGAL_TRANSITION

PENDING: Final = "pending"
RUNNING: Final = "running"
COMPLETED: Final = "completed"
ERROR: Final = "error"
CANCELLED: Final = "cancelled"
STOPPED: Final = "stopped"

Transitions = Mapping[str, frozenset[str]]
"""Each state with the states that may follow it."""


def terminal_states(transitions: Transitions) -> frozenset[str]:
    """Return the terminal states of `transitions`, which no other state may follow, such as `completed`."""
    return frozenset(state for state, followers in transitions.items() if not followers)


def wrong_state(transitions: Transitions, status: str, what: str, why: str | None = None) -> Outcome:
    """Return the outcome that rejects a record because its stream's state does not allow it.

    Args:
        transitions: the states of the stream's kind, each with the states that may follow it.
        status: the state of the stream before the record, one of the keys of `transitions`.
        what: the noun for the thing in that state, such as `job`. It appears in the explanation.
        why: the explanation for a state that is not terminal. `None` means `the <what> is <status>`.

    Returns:
        A rejection with the reason `after_terminal` if `status` is terminal, else `illegal_transition`.
    """
    if not transitions[status]:
        return rejected(AFTER_TERMINAL, f"the {what} is {status}", status)
    return rejected(ILLEGAL_TRANSITION, why or f"the {what} is {status}", status)


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
