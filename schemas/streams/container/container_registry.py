"""The record about a container, a process that a launcher runs for a task (HH-05)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from schemas.fold.life_cycles import RUNNING
from schemas.fold.view_rows import Moment, Row
from schemas.streams.session.session_registry import Handle
from schemas.wire.wire_body import Name, Note, WireBody, models_of

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
