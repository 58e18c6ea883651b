"""Sends a job's events to the hub over HTTP, without an MQTT broker (DL-08).

**Delivers** each event at least once, in the order of seq, with the same bytes at every attempt. **Acknowledges
when** the gateway has settled the event. **Loses** nothing: an event without an answer stays in the outbox.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final

from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.hub.answer_errors import said_in
from trunkline_agent.hub.hub_address import ANSWER_TIMEOUT_S
from trunkline_agent.hub.hub_requests import JSON_CONTENT, path_of
from trunkline_agent.hub.plans import Answer, Request, Retries, exchange
from trunkline_agent.hub.sync_client import HubClient
from trunkline_agent.outbox.delivery import INTERRUPTED, Confirmed, Interruption
from trunkline_agent.outbox.outbox import PendingEvent
from trunkline_agent.wire.ids import JOB, content_id, stream_key
from trunkline_agent.wire.receipt import LogPosition, Receipt
from trunkline_agent.wire.verdicts import REJECTED, TOO_LARGE

_VERDICT: Final = "trunkline-verdict"
_CLOSED: Final = "closed"


class HubDelivery:
    """The delivery of one job's events to the hub.

    Args:
        access: The address, with the token of the worker that has the job or of the delegator that registered
            it.
        job_id: The job.
        ca_certs: The file with the authority of the hub's TLS; None: those that this machine trusts.
        patience_s: How long an event without an answer is sent again.
    """

    def __init__(
        self,
        access: HubAccess,
        job_id: str,
        ca_certs: str | os.PathLike[str] | None = None,
        patience_s: float = 30.0,
    ) -> None:
        self._access, self._job_id, self._ca_certs = access, job_id, ca_certs
        self._patience_s = patience_s

    @property
    def longest_s(self) -> float:
        """The longest time in seconds that one event takes."""
        return self._patience_s + ANSWER_TIMEOUT_S

    def deliver(
        self,
        events: Iterable[PendingEvent],
        confirmed: Confirmed,
        *,
        wait_for_receipt: bool,
        interruption: Interruption,
    ) -> None:
        """Send the events in order, and return when all are settled.

        Raises:
            BackboneUnreachable: the hub does not answer, or the delivery was interrupted. Events that were
                confirmed before stay confirmed.
            Refused: the token is invalid or has no right to this job.
        """
        with HubClient(self._access, self._ca_certs) as client:
            interruption.also(client.close)
            try:
                for pending in events:
                    confirmed(pending, self._settled(client, pending))
            finally:
                interruption.forget(client.close)

    def _settled(self, client: HubClient, pending: PendingEvent) -> Receipt:
        request = Request(
            "POST",
            path_of("jobs", self._job_id, "events"),
            headers={"Content-Type": JSON_CONTENT},
            body=pending.wire_bytes,
        )
        try:
            return self._receipt(
                pending, client.run(exchange(request, Retries(self._patience_s), _is_about_event))
            )
        except TrunklineError as error:
            if error.reason == _CLOSED:
                raise BackboneUnreachable(INTERRUPTED) from None
            kept = f"Event {pending.seq} stays in the outbox and is sent first at the next publish"
            error.advice = f"{error.advice}. {kept}" if error.advice else kept
            raise

    def _receipt(self, pending: PendingEvent, answer: Answer) -> Receipt:
        said: Any = answer.json()
        try:
            if not answer.is_success:
                ce_id = content_id(stream_key(JOB, self._job_id).encode("ascii"), pending.wire_bytes)
                return Receipt(ce_id, pending.seq, REJECTED, str(said["reason"]))
            return Receipt(said["ce_id"], said["seq"], said["verdict"], None, LogPosition(*said["position"]))
        except (KeyError, TypeError):
            raise TrunklineError(
                "the answer to an event is not that of a Trunkline gateway", reason="not_a_gateway"
            ) from None


def _is_about_event(answer: Answer) -> bool:
    """Return whether the answer is about the event itself, so that sending it again would change nothing."""
    if answer.is_success or answer.headers.get(_VERDICT) == REJECTED:
        return True
    # The gateway drops a body over its limit before the log. Without this, the event would block all others.
    return answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and said_in(answer.body)[0] == TOO_LARGE
