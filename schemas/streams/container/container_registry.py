"""The record about what a launcher makes for a task (HH-05): its wire model and how a door makes it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from schemas.streams.session.session_registry import Handle
from schemas.wire.ids import CONTAINER, stream_key
from schemas.wire.record import CONTAINER_CHANGED, OutgoingRecord, content_id
from schemas.wire.strict_json import canonical
from schemas.wire.wire_body import Name, Note, WireBody


class ContainerChange(WireBody):
    """Body of `container.changed`: the container is in `state`, by `launcher`. What is None stays as it is
    known. `handle` says what runs on `host` (schemas.fold.view_rows.ContainerRow).
    """

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


CONTAINER_MODELS: Final[dict[str, type[WireBody]]] = {CONTAINER_CHANGED: ContainerChange}


def container_record(body: ContainerChange, *, door: str, principal: str) -> OutgoingRecord:
    """The record of a change. The same change by the same principal has the same `ce_id`."""
    value = canonical(body.model_dump(mode="json"))
    return OutgoingRecord(
        stream=stream_key(CONTAINER, body.container),
        ce_id=content_id(CONTAINER_CHANGED.encode(), f"{door}/{principal}".encode(), value),
        door=door,
        principal=principal,
        type=CONTAINER_CHANGED,
        value=value,
    )
