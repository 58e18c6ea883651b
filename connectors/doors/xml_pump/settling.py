"""Reports of the outcomes of messages to the gateway, many in one request (XP-08).

No outcome is lost while the process lives: without a gateway the same request is sent again and again, after
growing pauses.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
import structlog

from connectors.doors.xml_pump.gateway_link import AWAY_S, GatewayLink, NotTaken
from connectors.plumbing.network.rates import Backoff
from connectors.plumbing.xml_payloads.deliveries import HUH, NACK, Answer, Done
from connectors.plumbing.xml_payloads.huh import HUH_NAMESPACE, huh
from trunkline_agent.errors import BackboneUnreachable, Refused

log = structlog.stdlib.get_logger(__name__)

# Outcomes within this time are sent in one request.
_GATHER_S: Final = 0.002
_IN_FLIGHT: Final = 4
_ITEMS: Final = 100
_SETTLED: Final = ("accepted", "duplicate")
# Errors of reading an answer that has another form than agreed.
_UNREADABLE: Final = (AttributeError, KeyError, TypeError)


class _Item(NamedTuple):
    done: Done
    body: Mapping[str, Any]
    size: int
    reported: asyncio.Future[None]


class Settler:
    """The part of a pump that gathers the outcomes of messages and reports them to the gateway.

    Use it in one event loop.

    Args:
        link: The connection to the gateway.
        pump: The name of the pump.
        request_bytes: The largest size of one request in bytes.
    """

    def __init__(self, link: GatewayLink, pump: str, request_bytes: int) -> None:
        self._link = link
        self._pump = pump
        self._request_bytes = request_bytes
        self._waiting: list[_Item] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def settle(self, done: Done) -> None:
        """Report the outcome of one message, and return when the gateway has answered.

        Outcomes of several messages go into one request. While the gateway does not answer, the report is
        repeated, without limit. If the gateway refuses it, for instance because the lease has expired, that is
        logged and raises nothing.
        """
        loop = asyncio.get_running_loop()
        body = done.as_json()
        item = _Item(done, body, len(orjson.dumps(body)) + 1, loop.create_future())
        self._waiting.append(item)
        if self._timer is None:
            self._timer = loop.call_later(_GATHER_S, self._send_waiting)
        await item.reported

    def give_up(self) -> None:
        """Cancel all reports to the gateway that have no answer yet. Returns at once.

        Messages without a report go back to their mailboxes when their leases expire.
        """
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sending:
            task.cancel()

    def _send_waiting(self) -> None:
        self._timer = None
        while self._waiting and len(self._sending) < _IN_FLIGHT:
            task = asyncio.create_task(self._report(self._next_batch()))
            self._sending.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if self._waiting and self._timer is None:
            self._send_waiting()

    def _next_batch(self) -> list[_Item]:
        size, count = 0, 0
        for item in self._waiting[:_ITEMS]:
            if count and size + item.size > self._request_bytes:
                break
            size += item.size
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _report(self, batch: Sequence[_Item]) -> None:
        request_id, backoff = uuid.uuid4().hex, Backoff(*AWAY_S)
        while True:
            try:
                results = await self._link.settle(self._pump, [item.body for item in batch], request_id)
                found = {str(one["message_id"]): (one.get("verdict"), one.get("reason")) for one in results}
                break
            except (BackboneUnreachable, Refused, *_UNREADABLE) as error:
                why = "its answer cannot be read" if isinstance(error, _UNREADABLE) else str(error)
                wait_s = backoff.next_s()
                log.warning("gateway_away", what="settle", messages=len(batch), why=why, wait_s=wait_s)
                await asyncio.sleep(wait_s)
            except Exception as error:  # noqa: BLE001  the same request would be refused again
                await self._report_otherwise(batch, error)
                return
        for item in batch:
            message_id = item.done.message.message_id
            verdict, reason = found.get(message_id, (None, None))
            if verdict not in _SETTLED:
                # Its lease has expired, and another pump has leased the message.
                where = {"listener": item.done.message.listener, "message_id": message_id}
                log.warning("not_settled", **where, reason=reason)
            _finish(item)

    async def _report_otherwise(self, batch: Sequence[_Item], error: Exception) -> None:
        """Replace a request that was refused.

        First each message is reported by itself, then without its answers, then not at all.
        """
        if len(batch) > 1:
            for item in batch:
                await self._report([item])
            return
        (item,) = batch
        done = item.done
        where = {"listener": done.message.listener, "message_id": done.message.message_id}
        why = str(error) if isinstance(error, NotTaken) else type(error).__name__
        log.error("not_taken", **where, outcome=done.outcome, why=why)
        if done.outcome == NACK or done.reason == _UNSENDABLE:
            _finish(item)
            return
        body = huh(_UNSENDABLE, about_tag=done.message.kind, step="answer").decode("utf-8")
        other = Done(done.message, HUH, _UNSENDABLE, (Answer(None, "huh", HUH_NAMESPACE, body),))
        await self._report([_Item(other, other.as_json(), item.size, item.reported)])


_UNSENDABLE: Final = "the listener's answer cannot be sent"


def _finish(item: _Item) -> None:
    if not item.reported.done():
        item.reported.set_result(None)
