"""A client function for the XML door: post an XML document to the hub and read its answer (XP-15)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from connectors.gateway_client.gateway_client import GatewayClient

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from trunkline_agent.hub.plans import Answer

_PATH: Final = "/messages"


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
    answer = gateway.request(
        "POST",
        _PATH,
        _is_xml,
        body=document,
        headers={"Content-Type": "application/xml", "Idempotency-Key": request_id},
        query={**(sent or {}), **({} if sender is None else {"as": sender})},
    )
    if answer.status == 422:
        return PostedXml(answer.body.decode("utf-8"), "", {})
    from connectors.xml_wire.safe_xml import repair

    root = repair(answer.body).root
    return PostedXml(None, root.get("thread", ""), {one.get("to"): one.get("id") for one in root})


def _is_xml(answer: Answer) -> bool:
    is_xml = str(answer.headers.get("content-type", "")).startswith("application/xml")
    return is_xml and answer.status in (202, 422)
