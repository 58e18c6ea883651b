"""Sends a job's events to the hub over HTTP, for publishers that cannot reach an MQTT broker (DL-08).

**Delivers** each event at least once, in the order of seq, with the same bytes at every attempt. **Acknowledges
when** the gateway has settled the event. **Loses** nothing: an event without an answer stays in the outbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from connectors.agent_sdk.outbox import PendingEvent
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.mqtt_link.receipt import LogPosition, Receipt
from schemas.errors import TrunklineError
from schemas.wire.record import JSON_CONTENT
from schemas.wire.verdicts import REJECTED

if TYPE_CHECKING:
    import httpx2


def deliver_over_http(
    gateway: GatewayClient,
    job_id: str,
    events: Iterable[PendingEvent],
    confirmed: Callable[[PendingEvent, Receipt], None],
) -> None:
    """Send a job's events to the gateway in order, and return when all are settled.

    An event without an answer is sent again, up to five times, see `GatewayClient.request`.

    Args:
        gateway: A client with the token of the worker that has the job, or of the delegator that registered it.
        job_id: The job.
        events: The events, already numbered and signed.
        confirmed: Called with each event and its receipt before the next event is sent, whatever verdict the
            receipt has.

    Raises:
        BackboneUnreachable: the gateway does not answer. Events that were confirmed before stay confirmed.
        Refused: the token is invalid or has no right to this job.
    """
    for pending in events:
        answer = gateway.request(
            "POST",
            path_of("jobs", job_id, "events"),
            is_answer=lambda one: one.is_success or one.headers.get("Trunkline-Verdict") == REJECTED,
            content=pending.wire_bytes,
            headers={"Content-Type": JSON_CONTENT},
        )
        confirmed(pending, _receipt(pending, answer))


def _receipt(pending: PendingEvent, answer: httpx2.Response) -> Receipt:
    try:
        said: dict[str, Any] = answer.json()
        if not answer.is_success:
            return Receipt("", pending.seq, REJECTED, str(said["reason"]))
        return Receipt(said["ce_id"], said["seq"], said["verdict"], None, LogPosition(*said["position"]))
    except (ValueError, KeyError, TypeError):
        raise TrunklineError("the answer to an event is not that of a Trunkline gateway") from None
