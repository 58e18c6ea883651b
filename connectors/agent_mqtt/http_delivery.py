"""Sends a job's events to the hub over HTTP, for publishers that cannot reach an MQTT broker (DL-08).

**Delivers** each event at least once, in the order of seq, with the same bytes at every attempt. **Acknowledges
when** the gateway has settled the event. **Loses** nothing: an event without an answer stays in the outbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from connectors.agent_mqtt.outbox import PendingEvent
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.mqtt_link.receipt import LogPosition, Receipt
from schemas.wire.record import JSON_CONTENT
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub.plans import Answer
from trunkline_agent.wire.content_id import content_id
from trunkline_agent.wire.ids import JOB, stream_key
from trunkline_agent.wire.verdicts import REJECTED, TOO_LARGE


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
        try:
            answer = gateway.request(
                "POST",
                path_of("jobs", job_id, "events"),
                is_answer=_is_final,
                body=pending.wire_bytes,
                headers={"Content-Type": JSON_CONTENT},
            )
        except TrunklineError as error:
            raise type(error)(
                f"{error}. Event {pending.seq} stays in the outbox and is sent first at the next publish"
            ) from error
        confirmed(pending, _receipt(job_id, pending, answer))


def _is_final(answer: Answer) -> bool:
    """Return whether the answer is about the event itself, so that sending it again would change nothing."""
    if answer.is_success or answer.headers.get("trunkline-verdict") == REJECTED:
        return True
    # The gateway drops a body over its limit before the log. Without this, the event would block all others.
    return answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and _reason(answer) == TOO_LARGE


def _reason(answer: Answer) -> str | None:
    try:
        return str(answer.json()["reason"])
    except (ValueError, KeyError, TypeError):
        return None


def _receipt(job_id: str, pending: PendingEvent, answer: Answer) -> Receipt:
    try:
        said: dict[str, Any] = answer.json()
        if not answer.is_success:
            ce_id = content_id(stream_key(JOB, job_id).encode("ascii"), pending.wire_bytes)
            return Receipt(ce_id, pending.seq, REJECTED, str(said["reason"]))
        return Receipt(said["ce_id"], said["seq"], said["verdict"], None, LogPosition(*said["position"]))
    except (ValueError, KeyError, TypeError):
        raise TrunklineError("the answer to an event is not that of a Trunkline gateway") from None
