"""A client function for the XML door: post an XML document to the hub and read its answer (XP-15)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from trunkline_agent.xml.sender import MEDIA_TYPE, PATH, PostedXml, is_answer, posted_of

__all__ = ["PostedXml", "post_xml"]

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from trunkline_agent.hub.plans import Answer


def post_xml(
    gateway: GatewayClient,
    document: bytes,
    *,
    sender: str | None = None,
    request_id: str,
    sent: Mapping[str, Any] | None = None,
) -> PostedXml:
    """Post an XML document to the hub and return the hub's answer. Retries while the hub does not answer.

    A result whose `huh` is not None means that the message was not accepted.

    Args:
        gateway: The client to send with.
        document: The envelope with its payload, as bytes.
        sender: The human listener in whose name the operator writes; None for the operator's own name.
        request_id: The idempotency key. Another call with the same key sends the same message, so it has no
            further effect.
        sent: The query parameters `priority`, `expires_in_s` and `deliver_after_s`, those that are given.

    Raises:
        Refused: Too many messages wait, or the token is not accepted.
        BackboneUnreachable: The hub does not answer after a few attempts.
        TrunklineError: Any other error status of the hub.
    """
    answer = gateway.request(
        "POST",
        PATH,
        _is_xml,
        body=document,
        headers={"Content-Type": MEDIA_TYPE, "Idempotency-Key": request_id},
        query={**(sent or {}), **({} if sender is None else {"as": sender})},
    )
    return posted_of(answer.status, answer.body)


def _is_xml(answer: Answer) -> bool:
    return is_answer(answer.status, answer.headers.get("content-type", ""))
