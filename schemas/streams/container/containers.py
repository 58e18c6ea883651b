"""The stream `container/<name>`: a process that a launcher runs for a task (HH-05). Its record, row and fold.

The state is one entry, `container`. It remains after the container is recycled, so its name is not used again.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from pydantic import Field

from schemas.fold.entries import StructEntries
from schemas.fold.memories import content_digest
from schemas.fold.settled import Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import RUNNING, FoldInput, StreamKind, wrong_state
from schemas.fold.view_rows import Moment, Row, row_maker
from schemas.streams.session.sessions import Handle
from schemas.wire.wire_body import Name, Note, WireBody, models_of
from trunkline_agent.wire.ids import CONTAINER
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

CONTAINER_CHANGED: Final = "container.changed"
REGISTRY_CONTAINERS: Final = "registry_containers"

PROVISIONING: Final = "provisioning"
CONFIGURING: Final = "configuring"
STARTING: Final = "starting"
MONITORING: Final = "monitoring"
RECYCLING: Final = "recycling"
RECYCLED: Final = "recycled"
CONTAINER_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    PROVISIONING: frozenset({CONFIGURING, RECYCLING}),
    CONFIGURING: frozenset({STARTING, RECYCLING}),
    STARTING: frozenset({RUNNING, RECYCLING}),
    RUNNING: frozenset({MONITORING, RECYCLING}),
    MONITORING: frozenset({RECYCLING}),
    RECYCLING: frozenset({RECYCLED}),
    RECYCLED: frozenset(),
}
CONTAINER_STATES: Final = tuple(CONTAINER_TRANSITIONS)
OPEN: Final = "open"
"""The list of the containers that are not recycled."""


class ContainerRow(Row, frozen=True, gc=False):
    """A row of `registry_containers`: a process that a launcher started for a task."""

    VIEW: ClassVar = REGISTRY_CONTAINERS
    KEY: ClassVar = ("container",)
    ORDER: ClassVar = "created_at"

    container: str
    """Name of the container."""
    state: str
    """State in its life cycle, such as `running` or `recycled`."""
    task_id: str
    """Task for which the container was made."""
    agent_name: str
    """Agent that runs in the container."""
    backend: str
    """Kind of the launcher."""
    host: str | None
    """Host on which the container runs. Null: not yet known."""
    handle: str | None
    """Process on that host, in the form of `registry_sessions.handle`. Null: not yet known."""
    port: int | None
    """TCP port of the container. Null: none."""
    error: str | None
    """Why the container failed. Null: it has not."""
    created_at: Moment
    """Time at which the container was made."""
    changed_at: Moment
    """Time of the newest change of the container's state."""

    @property
    def is_live(self) -> bool:
        """True if the container is not recycled."""
        return self.state != RECYCLED

    @property
    def lists(self) -> tuple[str, ...]:
        """The list of the recycled containers, or of all others."""
        return (RECYCLED if self.state == RECYCLED else OPEN,)


class ContainerChange(WireBody):
    """Body of `container.changed`: the launcher `launcher` brought the container to the state `state`.

    `backend` is the kind of the launcher. `handle` is the process on `host`, as `tmux/<socket>/<name>` or
    `process/<pid>/<start time>`. `error` says why the container failed. `host`, `handle`, `port` and `error`
    leave the known value unchanged if they are `None`.
    """

    TYPE: ClassVar = CONTAINER_CHANGED
    STREAM: ClassVar = "container/{container}"
    IDENTITY: ClassVar = ("{origin}", "{content}")

    container: Name
    state: Literal["provisioning", "configuring", "starting", "running", "monitoring", "recycling", "recycled"]
    task_id: Name
    agent_name: Name
    backend: Name
    launcher: Name
    host: Name | None = None
    handle: Handle | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    error: Note | None = None


CONTAINER_MODELS: Final = models_of(ContainerChange)


ENTRY_VERSION: Final = 1
# Only the launcher that provisioned a container may start it. Any launcher may monitor and recycle it.
_OF_ITS_LAUNCHER: Final = frozenset({CONFIGURING, STARTING, RUNNING})
# Fields that a later body may set. An absent field leaves the known value unchanged.
_OPTIONAL: Final = ("host", "handle", "port", "error")


class ContainerEntry(msgspec.Struct, array_like=True, gc=False):
    """The stream state of a container: the fields of its row, and the launcher that provisioned it.

    `digests` maps each state that the container entered to the digest of the record's content.
    """

    version: int
    state: str
    task_id: str
    agent_name: str
    backend: str
    launcher: str
    created_at: int
    digests: dict[str, bytes]
    host: str | None = None
    handle: str | None = None
    port: int | None = None
    error: str | None = None


_CONTAINER: Final = StructEntries("container", ContainerEntry)
_row: Final = row_maker(ContainerRow, ContainerEntry)


def _settle_container(given: FoldInput) -> Outcome:
    """Settle a record of `container/<name>`: update the stream state, return verdict and changed rows.

    The record brings the container to a state. A container enters each state once, so a record with the same
    state and content is a duplicate, even with another id. `schemas.streams.fold.settle` calls this function
    with a checked body. The changes of the stream state, `given.entries`, count only if the record is accepted.
    """
    body = given.body
    wanted, digest = body["state"], content_digest(body)
    container = _CONTAINER.read(given.entries)
    if container is None:
        if wanted != PROVISIONING:
            return rejected(UNKNOWN_STREAM, "no container with this name")
        container = _provisioned(given)
    else:
        if container.digests.get(wanted) == digest:
            return duplicate(container.state)
        refusal = _refusal(wanted, body, container)
        if refusal is not None:
            return refusal
        container.state = wanted
    container.digests[wanted] = digest
    for field in _OPTIONAL:
        if body.get(field) is not None:
            setattr(container, field, body[field])
    _CONTAINER.write(given.entries, container)
    row = _row(container, container=given.name, changed_at=given.now_us)
    return accepted(container.state, (changed(row),))


def _provisioned(given: FoldInput) -> ContainerEntry:
    return ContainerEntry(
        version=ENTRY_VERSION,
        state=PROVISIONING,
        task_id=given.body["task_id"],
        agent_name=given.body["agent_name"],
        backend=given.body["backend"],
        launcher=given.body["launcher"],
        created_at=given.now_us,
        digests={},
    )


def _refusal(wanted: str, body: dict[str, Any], container: ContainerEntry) -> Outcome | None:
    """Return the rejection of a body that cannot bring the container to the state `wanted`."""
    state = container.state
    is_its_launcher = body["launcher"] == container.launcher
    if wanted == PROVISIONING and not is_its_launcher:
        return rejected(SEQ_CONFLICT, "another launcher has it", state)
    if wanted not in CONTAINER_TRANSITIONS[state]:
        return wrong_state(CONTAINER_TRANSITIONS, state, "container")
    if wanted in _OF_ITS_LAUNCHER and not is_its_launcher:
        return rejected(ILLEGAL_TRANSITION, "another launcher has it", state)
    made_for = (container.task_id, container.agent_name, container.backend)
    if (body["task_id"], body["agent_name"], body["backend"]) != made_for:
        return rejected(ILLEGAL_TRANSITION, "made for another task or agent, or by another backend", state)
    return None


CONTAINER_KIND: Final = StreamKind(
    name=CONTAINER,
    models=CONTAINER_MODELS,
    settle=_settle_container,
    row_of_each_stream=(ContainerRow,),
    rows=(ContainerRow,),
    named_by="container",
)
