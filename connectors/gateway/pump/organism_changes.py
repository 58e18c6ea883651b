"""Changes of the organism: appended, settled, and true everywhere before they are answered (XP-11, XP-12)."""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import refuse_rejected
from connectors.reactor.xml_records import gate_of
from schemas.errors import BackboneUnreachable
from schemas.fold.view_rows import ListenerRow
from schemas.streams.control.organism import ListenerAdded, ListenerRemoved, OrganismLoaded, organism_record
from schemas.streams.mailboxes.mailbox_entries import is_closed_mailbox
from schemas.streams.principal.principals import ACTIVE
from schemas.wire.ids import MAILBOX, stream_key
from schemas.wire.message import DEFAULT_REALM

_LOOK_S: Final = 0.02


class Applied(NamedTuple):
    """The verdict on the change; `pending`: how many messages waited for listeners that it removed, and go back
    to their senders.
    """

    verdict: str
    pending: int


async def apply_change(
    hub: Hub, body: OrganismLoaded | ListenerAdded | ListenerRemoved, *, door: str, principal: str
) -> Applied:
    """Append a change and wait until it is true: the mailboxes of removed listeners are closed in the log, and
    what was leased from them before is done with or given up; those of added ones are open.

    Raises ApiError when the fold rejects it; BackboneUnreachable when Kafka is away, or the rest takes longer
    than the listener's own time limit. The change itself is settled then.
    """
    before = {row.listener: row for row in hub.listeners.active()}
    record = organism_record(body, door=door, principal=principal)
    settled = refuse_rejected(await hub.appender.settle(record))
    after = {row.listener: row for row in hub.listeners.active()}
    # As they stand now: what is removed is closed.
    gone = [hub.listeners.row(name) or row for name, row in before.items() if name not in after]
    if isinstance(body, ListenerRemoved) and not gone:  # sent again, perhaps to another gateway
        known = hub.listeners.row(body.name)
        gone = [known] if known is not None and known.status != ACTIVE else []
    if isinstance(body, OrganismLoaded):
        # Asked again after a time-out: what was removed then may be handled still.
        gone += [row for row in hub.listeners.removed() if row not in gone and hub.listeners.held(row.listener)]
    come = [row for name, row in after.items() if before.get(name) != row]
    for one in (*gone, *come):
        # The reactor would append them, too, a moment later.
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
    """Wait for the reactor's record, which follows from the change that was settled."""
    deadline = time.monotonic() + hub.settings.gateway.settle_timeout_s
    stream = stream_key(MAILBOX, f"{DEFAULT_REALM}/{row.listener}")
    while is_closed_mailbox(hub.live_view.entries(stream)) != is_closed:
        if time.monotonic() > deadline:
            state = "closed" if is_closed else "open"
            raise BackboneUnreachable(f"the change is made, but a mailbox is not {state} yet: ask again")
        await asyncio.sleep(_LOOK_S)


async def _wait_not_leased(hub: Hub, row: ListenerRow) -> None:
    """Wait until nothing is leased: what was leased before the mailbox was closed is done with."""
    limit_s = (
        row.timeout_ms / 1000 + hub.settings.xml_pump.lease_margin_s + hub.settings.gateway.settle_timeout_s
    )
    deadline = time.monotonic() + limit_s
    while hub.listeners.held(row.listener):
        if time.monotonic() > deadline:
            raise BackboneUnreachable("the listener is removed, but a message of its is still being handled")
        await asyncio.sleep(_LOOK_S)
