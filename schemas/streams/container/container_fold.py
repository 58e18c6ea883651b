"""The fold of `container/<name>` (HH-05): what a launcher has made for a task, from provisioning to recycled.

One entry, `container`. A recycled container keeps it as its tombstone: its name is not used again.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.fold import life_cycles as states
from schemas.fold.entries import Entries
from schemas.fold.request_memory import content_digest
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.view_rows import REGISTRY_CONTAINERS, ContainerRow
from schemas.wire.record import Envelope, Record
from schemas.wire.verdicts import AFTER_TERMINAL, ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
_CONTAINER: Final = "container"
# Only the launcher that began may bring it up; whoever finds it afterwards may watch it and clear it away.
_OF_ITS_LAUNCHER: Final = frozenset({states.CONFIGURING, states.STARTING, states.RUNNING})


class ContainerEntry(msgspec.Struct, array_like=True, gc=False):
    """All that is known of a container; the fields of its row, and the digest of what said each state."""

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


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(ContainerEntry).decode


def settle_container(
    record: Record, envelope: Envelope, name: str, body: dict[str, Any], entries: Entries
) -> Outcome:
    """Settle one record of the container's stream whose body passed the checks of its wire model.

    Each state is entered once, so what is said again is known by its content, whatever its id.
    """
    wanted, digest = body["state"], content_digest(body)
    raw = entries.get(_CONTAINER)
    if raw is None:
        if wanted != states.PROVISIONING:
            return rejected(UNKNOWN_STREAM, "no container with this name")
        container = _provisioned(record, body)
    else:
        container = _decode(raw)
        if container.digests.get(wanted) == digest:
            return duplicate(container.state)
        refusal = _refusal(wanted, body, container)
        if refusal is not None:
            return refusal
        container.state = wanted
    container.digests[wanted] = digest
    _note(body, container)
    entries.put(_CONTAINER, _encode(container))
    return accepted(container.state, (_change(record, name, container),))


def _provisioned(record: Record, body: dict[str, Any]) -> ContainerEntry:
    return ContainerEntry(
        version=ENTRY_VERSION,
        state=states.PROVISIONING,
        task_id=body["task_id"],
        agent_name=body["agent_name"],
        backend=body["backend"],
        launcher=body["launcher"],
        created_at=record.logged_at_us,
        digests={},
    )


def _refusal(wanted: str, body: dict[str, Any], container: ContainerEntry) -> Outcome | None:
    """Why the container cannot go to the state `wanted` by this body, or None when it can."""
    state = container.state
    is_its_launcher = body["launcher"] == container.launcher
    if wanted == states.PROVISIONING and not is_its_launcher:
        return rejected(SEQ_CONFLICT, "another launcher has it", state)
    if state == states.RECYCLED:
        return rejected(AFTER_TERMINAL, "the container is recycled", state)
    if wanted not in states.CONTAINER_TRANSITIONS[state]:
        return rejected(ILLEGAL_TRANSITION, f"the container is {state}", state)
    if wanted in _OF_ITS_LAUNCHER and not is_its_launcher:
        return rejected(ILLEGAL_TRANSITION, "another launcher has it", state)
    made_for = (container.task_id, container.agent_name, container.backend)
    if (body["task_id"], body["agent_name"], body["backend"]) != made_for:
        return rejected(ILLEGAL_TRANSITION, "made for another task or agent, or by another backend", state)
    return None


def _note(body: dict[str, Any], container: ContainerEntry) -> None:
    """Take what the body knows; the rest stays as it is known."""
    for field in ("host", "handle", "port", "error"):
        if body.get(field) is not None:
            setattr(container, field, body[field])


def _change(record: Record, name: str, container: ContainerEntry) -> Change:
    row = ContainerRow(
        container=name,
        state=container.state,
        task_id=container.task_id,
        agent_name=container.agent_name,
        backend=container.backend,
        host=container.host,
        handle=container.handle,
        port=container.port,
        error=container.error,
        created_at=container.created_at,
        changed_at=record.logged_at_us,
    )
    return Change(REGISTRY_CONTAINERS, name, row)
