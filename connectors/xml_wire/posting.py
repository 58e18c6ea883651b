"""Posts an XML document to the hub (XP-15), and reads what it answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from connectors.gateway_client.gateway_client import GatewayClient
from schemas.errors import BackboneUnreachable, Refused, TrunklineError

if TYPE_CHECKING:
    import httpx

_PATH: Final = "/messages"
_ANSWER_S: Final = 40.0
_WAITS_S: Final = (0.2, 0.5, 1.0)


@dataclass(frozen=True)
class PostedXml:
    """What the hub said. `huh`: what was wrong, as it came; else `thread`, and the message id by recipient."""

    huh: str | None
    thread: str
    messages: dict[str, str]


def post_xml(
    gateway: GatewayClient, document: bytes, *, sender: str | None = None, request_id: str
) -> PostedXml:
    """Send a document; the same `request_id` again is the same message. `sender`: the human listener in whose
    name the operator writes. Raises what GatewayClient raises, and Refused when too many wait.
    """
    import httpx

    headers = {"Content-Type": "application/xml", "Idempotency-Key": request_id}
    parameters = {} if sender is None else {"as": sender}
    with gateway.connection(_ANSWER_S) as http:
        for wait_s in (*_WAITS_S, None):
            problem: TrunklineError
            try:
                answer = http.post(_PATH, content=document, headers=headers, params=parameters)
            except httpx.TransportError as error:
                problem = gateway.unreachable(error)
            else:
                if answer.status_code in (202, 422) and _is_xml(answer):
                    return _read(answer)
                problem = gateway.error_of(answer)
                if answer.status_code == 429:
                    problem = Refused(f"{problem}; try again in {answer.headers.get('Retry-After', '1')} s")
            if wait_s is None or not isinstance(problem, BackboneUnreachable):
                raise problem
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _is_xml(answer: httpx.Response) -> bool:
    return str(answer.headers.get("content-type", "")).startswith("application/xml")


def _read(answer: httpx.Response) -> PostedXml:
    if answer.status_code == 422:
        return PostedXml(answer.text, "", {})
    from connectors.xml_wire.safe_xml import repair

    root = repair(answer.content).root
    return PostedXml(None, root.get("thread", ""), {one.get("to"): one.get("id") for one in root})
