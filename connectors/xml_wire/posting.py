"""A client function for the XML door: post an XML document to the hub and read its answer (XP-15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from connectors.gateway_client.gateway_client import CONNECT_TIMEOUT_S, GatewayClient
from trunkline_agent.errors import Refused
from trunkline_agent.xml.posting import MEDIA_TYPE, PATH, PostedXml, is_answer, posted_of

__all__ = ["PostedXml", "post_xml"]

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import httpx2

_ANSWER_S: Final = 40.0
_TOO_MANY: Final = 429


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
    import httpx2

    answer = gateway.request(
        "POST",
        PATH,
        lambda answer: answer.status_code == _TOO_MANY or _is_xml(answer),
        content=document,
        headers={"Content-Type": MEDIA_TYPE, "Idempotency-Key": request_id},
        params={**(sent or {}), **({} if sender is None else {"as": sender})},
        timeout=httpx2.Timeout(_ANSWER_S, connect=CONNECT_TIMEOUT_S),
    )
    if answer.status_code == _TOO_MANY:
        again_s = answer.headers.get("Retry-After", "1")
        raise Refused(f"{gateway.error_of(answer)}; try again in {again_s} s")
    return posted_of(answer.status_code, answer.content)


def _is_xml(answer: httpx2.Response) -> bool:
    return is_answer(answer.status_code, str(answer.headers.get("content-type", "")))
