"""The fold of the stream `container/<name>`: a process that a launcher runs for a task (HH-05).

The state is one entry, `container`. It remains after the container is recycled, so its name is not used again.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.life_cycles import RUNNING, wrong_state
from schemas.fold.memories import content_digest
from schemas.fold.settled import Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.fold.view_rows import row_maker
from schemas.streams.container.container_registry import (
    CONFIGURING,
    CONTAINER_MODELS,
    CONTAINER_TRANSITIONS,
    PROVISIONING,
    STARTING,
    ContainerRow,
)
from trunkline_agent.wire.ids import CONTAINER
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

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


def settle_container(given: FoldInput) -> Outcome:
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
    settle=settle_container,
    row_of_each_stream=(ContainerRow,),
    rows=(ContainerRow,),
    named_by="container",
)
