"""A client function for the XML door: post an XML document to the hub and read its answer (XP-15)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from connectors.gateway_client.gateway_client import CONNECT_TIMEOUT_S, GatewayClient
from trunkline_agent.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import httpx2

_PATH: Final = "/messages"
_ANSWER_S: Final = 40.0
_TOO_MANY: Final = 429


@dataclass(frozen=True)
class PostedXml:
    """The hub's answer to an XML document.

    Attributes:
        huh: the XML that says what was wrong; None: the message was accepted.
        thread: the thread of the accepted message, else empty.
        messages: the ids of the stored messages, by recipient.
    """

    huh: str | None
    thread: str
    messages: dict[str, str]


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
        _PATH,
        lambda answer: answer.status_code == _TOO_MANY or _is_xml(answer),
        content=document,
        headers={"Content-Type": "application/xml", "Idempotency-Key": request_id},
        params={**(sent or {}), **({} if sender is None else {"as": sender})},
        timeout=httpx2.Timeout(_ANSWER_S, connect=CONNECT_TIMEOUT_S),
    )
    if answer.status_code == _TOO_MANY:
        again_s = answer.headers.get("Retry-After", "1")
        raise Refused(f"{gateway.error_of(answer)}; try again in {again_s} s")
    if answer.status_code == 422:
        return PostedXml(answer.text, "", {})
    from connectors.xml_wire.safe_xml import repair

    root = repair(answer.content).root
    return PostedXml(None, root.get("thread", ""), {one.get("to"): one.get("id") for one in root})


def _is_xml(answer: httpx2.Response) -> bool:
    is_xml = str(answer.headers.get("content-type", "")).startswith("application/xml")
    return is_xml and answer.status_code in (202, 422)
