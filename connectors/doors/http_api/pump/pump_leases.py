"""Leases the messages of listeners to pumps, within the concurrency and rate of each listener.

This module chooses the messages. The log decides whether the pump gets them, because several gateways may lease
the same messages at once.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from connectors.doors.http_api.pump.pump_models import LeaseRequest
from connectors.hub.engine.operation import reserve_bytes
from connectors.hub.reactor.derived_records import XML_DOOR
from connectors.hub.services.conversations import thread_of
from connectors.hub.services.hub import Hub
from connectors.operations.messages.shown_messages import answer_bytes_of
from schemas.streams.control.organism import ListenerRow
from schemas.streams.mailboxes.mailbox_bodies import MailboxLease, MessageNack
from schemas.streams.mailboxes.message import (
    DEFAULT_REALM,
    LEASED,
    MESSAGE_PENDING,
    UNREAD,
    MessageBodyRow,
    MessageRow,
)
from schemas.streams.principal.principals import ACTIVE
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED

HUMAN: Final = "human"
# The pause for a listener after the rate or another gateway prevented a lease.
_REST_S: Final = 0.25
_BOUNCE_MS: Final = 30_000
# The columns of a message that a pump gets.
_SHOWN: Final = ("message_id", "request_id", "attempts", "sender", "from_verified", "priority", "in_reply_to")


class _Taken(NamedTuple):
    """Messages out of the queue of a listener, and the bytes of an answer that are left for them.

    `body_bytes` is how many they need at most.
    """

    row: ListenerRow
    ids: list[str]
    bytes_most: int
    body_bytes: int


class PumpLeases:
    """The leases of messages to pumps that this gateway makes. For coroutines of one event loop.

    One gateway has one object of this class.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._resting: dict[str, float] = {}

    async def wait_leased(
        self, asked: LeaseRequest, principal: str, is_gone: Callable[[], Awaitable[bool]]
    ) -> list[dict[str, Any]]:
        """Lease messages to a pump and return them as JSON. Wait up to `asked.wait_ms` for the first message.

        The list is empty if the time has passed, the client has disconnected, or the gateway stops. It is also
        empty if `asked.version` is not the organism's version. A message that was leased before is leased only
        if `asked.alone` is set; if only such messages wait, the list is empty at once. The fields `version` and
        `suspects` of the HTTP answer tell the pump these cases apart.

        Args:
            asked: The pump, and how many messages it can take for each listener.
            principal: The principal of the pump.
            is_gone: Returns whether the client has disconnected.

        Raises:
            ApiError: 503 if the gateway has no room for the answer.
            BackboneUnreachable: Kafka is unreachable, and no message was leased.
        """
        listeners, deadline = self._hub.listeners, time.monotonic() + asked.wait_ms / 1000
        while True:
            seen = listeners.changes
            # Messages leased for a killed pump would be handled by no one until the lease expires.
            if await is_gone():
                return []
            found = await self._leased(asked, principal)
            left = deadline - time.monotonic()
            if found or left <= 0 or listeners.version != asked.version or self._hub.stopping.is_set():
                return found
            if not asked.alone and listeners.suspects(asked.wants):
                return []  # the pump must ask for one of them alone
            self._hub.answer_memory.release()
            # A listener in its pause is tried again without a change.
            await listeners.wait_change(seen, min(left, _REST_S if self._resting else left))

    async def _leased(self, asked: LeaseRequest, principal: str) -> list[dict[str, Any]]:
        taken = self._taken(asked)
        try:
            await reserve_bytes(self._hub, principal, sum(one.body_bytes for one in taken))
        except BaseException:
            for one in taken:
                self._give_back(one)
            raise
        parts = await asyncio.gather(
            *(self._lease(one, asked.pump, principal) for one in taken), return_exceptions=True
        )
        failures = [part for part in parts if isinstance(part, BaseException)]
        found = [message for part in parts if not isinstance(part, BaseException) for message in part]
        if failures and not found:
            raise failures[0]
        return found

    def _taken(self, asked: LeaseRequest) -> list[_Taken]:
        """Take messages out of the queues, by listener. All together have the bytes of one answer at most."""
        listeners, free, now = self._hub.listeners, asked.free, time.monotonic()
        self._resting = {name: until for name, until in self._resting.items() if until > now}
        found: list[_Taken] = []
        left = self._hub.settings.limits.answer_bytes
        for name, places in self._in_turn(asked.wants):
            row = listeners.row(name)
            if row is None or free <= 0 or places <= 0 or name in self._resting or (found and left <= 0):
                continue
            if row.status != ACTIVE:
                ids = listeners.take_all(name, free)
            elif asked.alone:
                one = listeners.take_suspect(row)
                ids = [] if one is None else [one]
            else:
                ids = listeners.take(row, min(places, free))
            if ids:
                body_bytes = answer_bytes_of(self._hub, (DEFAULT_REALM, name), len(ids), left)
                found.append(_Taken(row, ids, left, body_bytes))
                left -= body_bytes
                free -= len(ids)
                if asked.alone and row.status == ACTIVE:
                    break
        return found

    def _in_turn(self, wants: Mapping[str, int]) -> list[tuple[str, int]]:
        """Return the wanted listeners and the removed ones with waiting messages.

        The order rotates, so that no listener is always the last when places are few.
        """
        listeners = self._hub.listeners
        gone = [row.listener for row in listeners.removed() if listeners.waiting(row.listener)]
        names = [*wants.items(), *((name, len(wants) + 1) for name in gone)]
        start = listeners.changes % max(1, len(names))
        return names[start:] + names[:start]

    def _rows(self, taken: _Taken) -> list[MessageRow]:
        found = (self.message(taken.row.listener, one) for one in taken.ids)
        return [one for one in found if one is not None]

    def _give_back(self, taken: _Taken) -> None:
        """Put the messages back that this request did not lease, unless another one leased them."""
        self._hub.listeners.give_back(
            taken.row.listener, lambda: [one for one in self._rows(taken) if one.status == UNREAD]
        )

    async def _lease(self, taken: _Taken, pump: str, principal: str) -> list[dict[str, Any]]:
        row, is_gone = taken.row, taken.row.status != ACTIVE
        request_id = f"{pump}.{uuid.uuid4().hex}"
        margin_ms = round(self._hub.settings.xml_pump.lease_margin_s * 1000)

        try:
            record = MailboxLease(
                to=row.listener,
                request_id=request_id,
                limit=len(taken.ids),
                lease_ms=_BOUNCE_MS if is_gone else row.timeout_ms + margin_ms,
                message_ids=list(taken.ids),
                held_most=None if is_gone else row.concurrency,
                per_minute=None if is_gone else row.per_minute,
                from_closed=True if is_gone else None,
                bytes_most=max(0, taken.bytes_most),
            ).record(door=XML_DOOR, principal=principal)
            settled = await self._hub.appender.settle(record)
        finally:
            self._give_back(taken)
        rows = self._rows(taken)
        mine = [one for one in rows if one.status == LEASED and one.request_id == request_id]
        # An expired message is not the fault of another gateway.
        others = [one for one in rows if one.status in MESSAGE_PENDING and one.request_id != request_id]
        shown = [self._shown(row, one, is_gone=is_gone) for one in mine]
        if settled.verdict == REJECTED or (others and not self._is_cut(taken, shown, others)):
            self._resting[row.listener] = time.monotonic() + _REST_S
        return shown

    def _is_cut(self, taken: _Taken, shown: list[dict[str, Any]], others: list[MessageRow]) -> bool:
        """Return whether the other messages were not leased because of the bytes of an answer alone."""
        if not shown or any(one.status != UNREAD for one in others):
            return False
        body = self._hub.live_view.get(MessageBodyRow, others[0].key)
        size = 0 if body is None else len(body.body.encode())
        return size + sum(len(one["body"].encode()) for one in shown) > taken.bytes_most

    def message(self, listener: str, message_id: str) -> MessageRow | None:
        """Return the row of a message in a listener's mailbox, or None if there is no such message.

        `listener` is the listener's name.
        """
        return self._hub.live_view.get(MessageRow, f"{DEFAULT_REALM}/{listener}/{message_id}")

    def _shown(self, row: ListenerRow, message: MessageRow, *, is_gone: bool) -> dict[str, Any]:
        body = self._hub.live_view.get(MessageBodyRow, message.key)
        found = {
            "listener": row.listener,
            **{name: getattr(message, name) for name in _SHOWN},
            "kind": message.kind,
            "content_type": "" if body is None else body.content_type,
            "body": "" if body is None else body.body,
            "thread": thread_of(self._hub.keyring, message),
            "is_reply": message.root_thread is not None and message.parent_thread is None,
            "timeout_ms": row.timeout_ms,
        }
        return {**found, "listener_gone": True} if is_gone else found

    async def release(self, pump: str, principal: str) -> int:
        """End the leases that an earlier process of a pump has, and return the number of ended leases.

        `pump` is the pump's name, which the new process has, too. All leases under this name end, whichever
        principal took them; `principal` is the author of the records that end them. The route that starts a
        pump calls this method. The messages can be leased again at once. Leases that have ended meanwhile are
        not counted.

        Raises:
            BackboneUnreachable: Kafka is unreachable. Some leases may have been ended.
        """
        hub = self._hub
        held = [
            message
            for row in (*hub.listeners.active(), *hub.listeners.removed())
            for message_id in hub.listeners.held(row.listener)
            if (message := self.message(row.listener, message_id)) is not None
            and (message.request_id or "").startswith(f"{pump}.")
        ]
        settled = await hub.appender.settle_all(
            MessageNack(
                to=message.recipient,
                message_id=message.message_id,
                request_id=str(message.request_id),
                reason="its pump has started again",
            ).record(door=XML_DOOR, principal=principal)
            for message in held
        )
        return sum(one.verdict == ACCEPTED for one in settled)
