"""The HTTP routes of XML pumps (XP-08), which lease and settle messages, and of listeners and threads.

A pump has the operator's rights, because it sends messages in the name of every listener.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Final

from fastapi import Path, Request, Response

from connectors.doors.http_api.pump.pump_answers import opens_thread, settle_done
from connectors.doors.http_api.pump.pump_leases import PumpLeases
from connectors.doors.http_api.pump.pump_models import (
    HistoryAnswer,
    HistoryRequest,
    LeaseAnswer,
    LeaseRequest,
    ListenerFilter,
    ListenersAnswer,
    PumpStart,
    PumpStarted,
    SettleAnswer,
    SettleRequest,
    ThreadAnswer,
    ThreadFilter,
    ThreadsAnswer,
)
from connectors.hub.engine.family import ROW_BYTES, Family, LongAnswer, page_by_name
from connectors.hub.engine.operation import Asked
from connectors.hub.reactor.derived_records import XML_CONTENT, XML_DOOR
from connectors.hub.services.conversations import child_thread
from connectors.hub.services.hub import Hub
from connectors.hub.serving.admission import Routes
from connectors.hub.serving.answers import encoded_within, json_answer, not_found, row_as_json
from connectors.hub.serving.identities import caller_of
from connectors.hub.serving.models import NAMED
from connectors.hub.serving.policy import Action
from connectors.operations.messages.shown_messages import reserve_answer
from schemas.streams.control.organism import ListenerRow
from schemas.streams.mailboxes.message import (
    DEFAULT_REALM,
    MessageBodyRow,
    MessageRow,
    verified_message,
)
from schemas.streams.principal.principals import SYSTEM
from schemas.streams.thread.threads import ALL, ThreadRow
from trunkline_agent.wire.moments import iso_moment

PUMP: Final = "/api/hub/pump"
LISTENERS: Final = Family("/api/hub/listeners")
THREADS: Final = Family("/api/hub/threads")
BOOT_TAG: Final = "boot"
ThreadPath = Annotated[str, Path(**NAMED, description="Id of the thread.")]
_NAMESPACE: Final = uuid.UUID("4a0f1f0e-6d2b-5f19-9a53-5d1f0f0c9d88")
# The root of the system's own conversations.
ROOT_THREAD: Final = str(uuid.uuid5(_NAMESPACE, "root"))


def add_pump_routes(routes: Routes, hub: Hub) -> None:
    """Add the routes under `/api/hub/pump`."""
    leases = PumpLeases(hub)
    _add_work(routes, hub, leases)
    _add_start(routes, hub, leases)


def _add_start(routes: Routes, hub: Hub, leases: PumpLeases) -> None:
    @routes.post(f"{PUMP}/started", Action.PUMP_RUN, PumpStarted)
    async def start_pump(request: Request, body: PumpStart) -> Response:
        """Start a pump: end the leases of an earlier process of this pump, and send `<boot/>` to listeners.

        The listeners are those with the root tag `boot`.
        """
        hub.appender.check()
        released = await leases.release(body.pump, caller_of(request).principal)
        start = uuid.uuid4()
        threads = [
            (
                row,
                child_thread(hub.keyring, ROOT_THREAD, SYSTEM, row.listener),
                str(uuid.uuid5(start, row.listener)),
            )
            for row in hub.listeners.of_tag(BOOT_TAG)
        ]
        boots = [
            verified_message(
                message_id,
                SYSTEM,
                row.listener,
                BOOT_TAG,
                f'<boot xmlns="{row.namespace}"></boot>' if row.namespace else "<boot></boot>",
                XML_CONTENT,
                thread=thread,
                parent_thread=ROOT_THREAD,
                root_thread=ROOT_THREAD,
                on_behalf_of=SYSTEM,
                opens_thread=opens_thread(hub, thread, message_id),
                unlimited=True,
            )
            for row, thread, message_id in threads
        ]
        await hub.appender.settle_all(boot.record(door=XML_DOOR, principal=SYSTEM) for boot in boots)
        return json_answer({"released": released, "version": hub.listeners.version})


def _add_work(routes: Routes, hub: Hub, leases: PumpLeases) -> None:
    @routes.post(f"{PUMP}/lease", Action.PUMP_RUN, LeaseAnswer)
    async def lease_messages(request: Request, body: LeaseRequest) -> Response:
        """Lease messages of listeners to a pump. The request waits up to `wait_ms` for the first message.

        The list is empty if no message could be leased. The bodies of one answer have `limits.answer_bytes` at
        most, and the body of one message more; the other messages wait.
        """
        hub.appender.check()
        messages = await leases.wait_leased(body, caller_of(request).principal, request.is_disconnected)
        suspects = hub.listeners.suspects(body.wants)
        return json_answer({"version": hub.listeners.version, "suspects": suspects, "messages": messages})

    @routes.post(f"{PUMP}/settle", Action.PUMP_RUN, SettleAnswer)
    async def settle_messages(request: Request, body: SettleRequest) -> Response:
        """Settle leased messages by their outcome. The handlers' answers are sent only if the lease is valid.

        A message whose lease is no longer valid has the verdict `rejected` in the answer; the status is 200
        nevertheless.
        """
        hub.appender.check()
        results = await settle_done(hub, body.done, caller_of(request).principal)
        return json_answer({"results": results})

    @routes.post(f"{PUMP}/history", Action.THREAD_READ, HistoryAnswer)
    async def show_conversation(request: Request, body: HistoryRequest) -> Response:
        """Return the newest messages that a listener sent or received in a conversation, oldest first.

        The list is empty for an unknown thread. An answer has `limits.answer_bytes` at most, unless it has only
        one message; `left` is the number of older messages that were asked for beyond that.
        """
        most = hub.settings.limits.answer_bytes
        await reserve_answer(hub, caller_of(request).principal, None, body.limit, most)
        keys = hub.conversations.message_keys(body.thread)[-body.limit :]
        found = (hub.live_view.get(MessageRow, key) for key in reversed(keys))
        rows = [row for row in found if row is not None and _is_of(row, body.listener)]
        shown = encoded_within((_said(hub, row, body.listener) for row in rows), most)
        return json_answer({"messages": shown[::-1], "left": len(rows) - len(shown)})


# The operator's alone: the organism defines which listeners know of each other (XP-09, XP-14).
@LISTENERS.get("", Action.LISTENER_READ, ListenersAnswer)
def list_listeners(hub: Hub, asked: Asked, wanted: ListenerFilter) -> LongAnswer:
    """List the active or the removed listeners, each with the number of messages that wait for it.

    An answer has `limits.answer_bytes` at most.
    """

    def shown(row: ListenerRow) -> dict[str, Any]:
        return {**row_as_json(row), "waiting": hub.listeners.waiting(row.listener)}

    said: dict[str, Any] = {"version": hub.listeners.version, "fault": hub.organism.fault}
    rows = hub.listeners.active() if wanted.status == "active" else hub.listeners.removed()
    return page_by_name(hub, "listeners", rows, lambda row: row.listener, wanted, shown, **said)


@THREADS.get("", Action.THREAD_READ, ThreadsAnswer)
def list_threads(hub: Hub, asked: Asked, wanted: ThreadFilter) -> LongAnswer:
    """List threads, newest first; with `root` only those of the tree that begins with this thread."""

    def document() -> dict[str, Any]:
        rows = hub.lists.threads.newest([ALL if wanted.root is None else wanted.root], wanted.limit)
        return {"threads": [row_as_json(row) for row in rows]}

    return LongAnswer(wanted.limit * ROW_BYTES, document)


@THREADS.get("/{name}", Action.THREAD_READ, ThreadAnswer)
def show_thread(hub: Hub, asked: Asked, name: ThreadPath) -> dict[str, Any]:
    """Show one thread: the principal that opened it, the one that knows it, and its parent thread.

    The first thread of a tree has no parent (null). The answer is 404 for an unknown thread.
    """
    row = hub.live_view.get(ThreadRow, name)
    found = _root_thread(hub, name) if row is None else row_as_json(row)
    if found is None:
        raise not_found("no thread of this id; a thread is known a moment after its first message")
    return found


def _root_thread(hub: Hub, name: str) -> dict[str, Any] | None:
    """Return a root, which has no row, from the first thread below it; None without such a thread."""
    first = hub.lists.threads.oldest(name)
    if first is None:
        return None
    opener = first.on_behalf_of
    root = {"thread": name, "parent_thread": None, "opened_by": opener, "seen_by": opener}
    return {**row_as_json(first), **root}


def _is_of(row: MessageRow, listener: str) -> bool:
    return row.realm == DEFAULT_REALM and listener in (row.sender, row.recipient)


def _said(hub: Hub, row: MessageRow, listener: str) -> dict[str, Any]:
    body = hub.live_view.get(MessageBodyRow, row.key)
    return {
        "message_id": row.message_id,
        "sender": row.sender,
        "to": row.recipient,
        "in_reply_to": row.in_reply_to,
        "kind": row.kind,
        "body": "" if body is None else body.body,
        "is_own": row.sender == listener,
        "posted_at": iso_moment(row.posted_at),
    }
