"""The engine and the careful path answer each request with the same bytes, and leave the same records (ST-90).

A request is sent twice: as it is, and with a header that lets the careful path serve it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.connectors.doors.http_api.both_ways import USUAL, VALUES, Sender, changed, close_all, direct, pair
from tests.connectors.doors.http_api.hub_stack import MESSAGES, HubStack

pytestmark = pytest.mark.requirement("ST-90")


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(scope="module")
def sides(hub: HubStack) -> list[Sender]:
    """A principal for each way."""
    return pair(hub, "worker")


# Of the operations on leased messages.
LEASE_VALUES: dict[str, tuple[Any, ...]] = {
    "lease_id": ("no-lease", "", None, 5),
    "message_ids": (["$MESSAGE", "$MESSAGE"], ["nobody", "$MESSAGE"], [], ["a b"], None, ["x"] * 1001),
    "reason": ("broken", "x" * 501, "a\u0000b", None),
    "lease": (3600, 300, 300.0, 0, 1.5, 10**9, True, "5", None),
    "no_such_field": (1,),
}
BROADCAST_VALUES = {name: values for name, values in VALUES.items() if name != "recipient"}
QUERIES = (b"", b"", b"?limit=1", b"?limit=0", b"?limit=x", b"?limit=1&limit=2", b"?lease=300", b"?lease=0.5")
QUERIES += (b"?", b"?limit=1#f", b"?a b", b"?limit=\xff", b"?limit=%31", b"?limit=+1")
QUERIES += (b"?limit=2&lease=600", b"?wait=0", b"?wait=0.01", b"?nothing=1", b"?wait_reply=0.01", b"?%6cimit=3")


def requests(draw: random.Random, count: int) -> Iterator[tuple[bytes, list[bytes], bytes]]:
    """Usual requests with up to three changes, most of them with one."""
    for _ in range(count):
        path, said, values = b"", dict[str, Any](recipient="$NAME", type="note"), VALUES
        method = draw.choice((b"POST", b"POST", b"GET"))
        if method == b"POST" and draw.random() < 0.4:
            path, values = draw.choice((b"/ack", b"/nack", b"/extend")), LEASE_VALUES
            said = {"lease_id": "$LEASE", "message_ids": ["$MESSAGE"]}
            said |= {"lease": 600} if path == b"/extend" else {}
        elif method == b"POST" and draw.random() < 0.2:
            path, said, values = b"/broadcast", {"type": "note"}, BROADCAST_VALUES
        yield changed(draw, method, MESSAGES.encode() + path, said, values, QUERIES)


@pytest.mark.parametrize("seed", range(3))
def test_both_ways_give_the_same_answer_and_the_same_mailbox(
    hub: HubStack, sides: list[Sender], seed: int
) -> None:
    before = direct(hub)
    for line, headers, body in requests(random.Random(seed), 300):
        # A length that does not fit would let the client wait.
        if b"Content-Length: 3" in headers and len(body) < 3:
            continue
        answers = [side.ask(line, headers, body) for side in sides]
        assert answers[0] == answers[1], (line, headers, body)
    after = direct(hub)
    assert after["answered"] - before.get("answered", 0) > 30


def test_usual_requests_are_answered_by_the_engine(hub: HubStack, sides: list[Sender]) -> None:
    before, side = direct(hub), sides[0]
    body, head = b'{"recipient": "$NAME", "type": "note"}', (*USUAL, b"Content-Length: $LENGTH")
    assert side.ask(b"POST /api/hub/messages HTTP/1.1", head, body).startswith(b"HTTP/1.1 200")
    assert side.ask(b"GET /api/hub/messages?limit=1000 HTTP/1.1", USUAL).startswith(b"HTTP/1.1 200")
    line, body = b"POST /api/hub/messages/broadcast HTTP/1.1", b'{"type": "note"}'
    assert side.ask(line, head, body).startswith(b"HTTP/1.1 200")
    assert direct(hub)["answered"] == before.get("answered", 0) + 3
