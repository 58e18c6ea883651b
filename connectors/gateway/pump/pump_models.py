"""The bodies of the routes that pumps use, and of the listeners' and threads' (XP-01, XP-07, XP-08)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from connectors.gateway.web.models import LIST_LIMIT, NamedThing
from schemas.streams.control.organism import LISTENERS_MOST, RootTag
from schemas.streams.mailboxes.mailbox_requests import ANSWERS_MOST
from schemas.wire.wire_body import Note

WAIT_MS_MOST = 10_000
DONE_MOST = 100
# A lease is named by its pump, a dot and 32 digits.
PumpName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,89}$")]
FREE_MOST = 1000


def _whole(value: Any) -> Any:
    # JSON knows no integers: 5.0 is one by JSON Schema, too.
    return int(value) if type(value) is float and value.is_integer() else value


_WHOLE = BeforeValidator(_whole)
_Places = Annotated[int, Field(ge=0, le=FREE_MOST), _WHOLE]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PumpStart(_Request):
    """A pump begins: what an earlier one of its name held is given back."""

    pump: PumpName


class PumpStarted(_Answer):
    """`released`: how many messages were given back."""

    released: int
    version: int


class LeaseRequest(_Request):
    """What a pump can handle now: `wants` says how many of each listener's messages, `free` how many in all.
    `alone`: one that was handed out before, because nothing else is under way.
    """

    pump: PumpName
    wants: Annotated[dict[NamedThing, _Places], Field(max_length=LISTENERS_MOST)]
    free: _Places
    alone: bool = False
    wait_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MOST), _WHOLE] = 0
    version: Annotated[int, _WHOLE] = -1


class LeaseAnswer(_Answer):
    """`suspects`: how many wait that were handed out before; `version`: that of the organism."""

    version: int
    suspects: int
    messages: list[dict[str, Any]]


class GivenAnswer(_Request):
    """One payload that a handler answered."""

    to: NamedThing | None = None
    kind: RootTag
    namespace: Annotated[str, Field(max_length=200)] | None = None
    body: str


class Done(_Request):
    """What came of a leased message. `huh`: nothing, and the one answer says why; `nack`: it is given back,
    because its holder ends or cannot run it, which is no fault of the message's and no attempt.
    """

    listener: NamedThing
    message_id: NamedThing
    request_id: NamedThing
    outcome: Literal["handled", "huh", "nack"]
    reason: Note = ""
    answers: Annotated[list[GivenAnswer], Field(max_length=ANSWERS_MOST)] = []


class SettleRequest(_Request):
    """What came of leased messages."""

    pump: PumpName
    done: Annotated[list[Done], Field(max_length=DONE_MOST)]


class SettleAnswer(_Answer):
    """For each message, in the same order, `message_id`, `verdict`, `reason`."""

    results: list[dict[str, Any]]


class HistoryRequest(_Request):
    """What was said in a conversation, as the listener knows it."""

    listener: NamedThing
    thread: NamedThing
    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT), _WHOLE] = 100


class HistoryAnswer(_Answer):
    """The messages, oldest first."""

    messages: list[dict[str, Any]]


class ListenerFilter(BaseModel):
    """Which listeners to list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Literal["active", "removed"] = "active"


class ListenersAnswer(_Answer):
    """The listeners by name; `version` rises with each change of the organism. `fault`: why this gateway has
    not loaded the organism file, null when it has.
    """

    version: int
    fault: str | None = None
    listeners: list[dict[str, Any]]


class ThreadFilter(BaseModel):
    """Which threads to list, newest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: NamedThing | None = None
    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT)] = 100


class ThreadsAnswer(_Answer):
    """Threads: who called whom, in whose name."""

    threads: list[dict[str, Any]]
