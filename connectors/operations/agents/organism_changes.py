"""Changes of the organism (the XML pump's listeners), answered once they have taken effect (XP-11, XP-12)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from connectors.hub.reactor.derived_records import gate_of
from connectors.hub.services.hub import Hub
from schemas.streams.control.organism import (
    ListenerAdded,
    ListenerRemoved,
    ListenerRow,
    OrganismLoaded,
)
from schemas.streams.mailboxes.mailbox_entries import is_closed_mailbox
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.principal.principals import ACTIVE
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.wire.ids import MAILBOX, stream_key

_LOOK_S: Final = 0.02


class Applied(NamedTuple):
    """The result of a change of the organism that has taken effect.

    Attributes:
        verdict: The verdict on the change, *accepted* or *duplicate*.
        pending: How many messages waited for the removed listeners. These messages are returned to their
            senders; 0 if no listener was removed.
    """

    verdict: str
    pending: int


async def apply_change(
    hub: Hub, body: OrganismLoaded | ListenerAdded | ListenerRemoved, *, door: str, principal: str
) -> Applied:
    """Append a change of the organism, and wait until the change has taken effect.

    Afterwards the mailboxes of added listeners are open. The mailboxes of removed listeners are closed, and
    none of their messages is leased. The wait may last as long as a removed listener's handler may run.

    Args:
        hub: The hub.
        body: The change: all listeners loaded from a file, one added, or one removed.
        door: The door of the record, such as `hub`.
        principal: The principal that makes the change.

    Returns:
        The verdict on the change, and the number of messages that waited for removed listeners.

    Raises:
        ApiError: The fold rejected the change.
        BackboneUnreachable: Kafka is unreachable, or the change is recorded but has not taken full effect in
            time. The same request can be repeated.
    """
    before = {row.listener: row for row in hub.listeners.active()}
    record = body.record(door=door, principal=principal)
    settled = await hub.appender.settle_accepted(record)
    after = {row.listener: row for row in hub.listeners.active()}
    # The present rows, which are marked as removed.
    gone = [hub.listeners.row(name) or row for name, row in before.items() if name not in after]
    if isinstance(body, ListenerRemoved) and not gone:  # a repeated request, perhaps at another gateway
        known = hub.listeners.row(body.name)
        gone = [known] if known is not None and known.status != ACTIVE else []
    if isinstance(body, OrganismLoaded):
        # A request repeated after a time-out: messages of the removed listeners may still be leased.
        gone += [row for row in hub.listeners.removed() if row not in gone and hub.listeners.held(row.listener)]
    come = [row for name, row in after.items() if before.get(name) != row]
    for one in (*gone, *come):
        # The process manager appends the same records a moment later.
        hub.appender.append_unattended(gate_of(one, record.ce_id))
    for row in come:
        await _wait_gate(hub, row, is_closed=False)
    pending = 0
    for row in gone:
        await _wait_gate(hub, row, is_closed=True)
        pending += hub.listeners.waiting(row.listener)
        await _wait_not_leased(hub, row)
    return Applied(settled.verdict, pending)


async def _wait_gate(hub: Hub, row: ListenerRow, *, is_closed: bool) -> None:
    """Wait until the mailbox of a listener is closed or open."""
    stream = stream_key(MAILBOX, f"{DEFAULT_REALM}/{row.listener}")
    state = "closed" if is_closed else "open"
    await _wait_until(
        lambda: is_closed_mailbox(hub.live_view.entries(stream)) == is_closed,
        hub.settings.gateway.settle_timeout_s,
        f"the change is recorded, but a mailbox is not {state} yet; try again",
    )


async def _wait_not_leased(hub: Hub, row: ListenerRow) -> None:
    """Wait until no message of a removed listener is leased any more."""
    limit_s = (
        row.timeout_ms / 1000 + hub.settings.xml_pump.lease_margin_s + hub.settings.gateway.settle_timeout_s
    )
    why_not = "the listener is removed, but one of its messages is still being handled"
    await _wait_until(lambda: not hub.listeners.held(row.listener), limit_s, why_not)


async def _wait_until(is_so: Callable[[], bool], limit_s: float, why_not: str) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise BackboneUnreachable(why_not)
        await asyncio.sleep(_LOOK_S)
