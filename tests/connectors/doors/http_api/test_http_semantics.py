"""HEAD, and headers that give a body another meaning, at each route of the hub (RFC 9110)."""

from __future__ import annotations

import pytest

from tests.connectors.doors.http_api.hub_stack import MESSAGES
from tests.connectors.doors.http_api.test_hub_errors import page

JSON = "application/json"
STREAMS = ("/api/hub/events", "/api/hub/messages/events")
# Each answer to one of these has a time or a number of its own.
CHANGING = ("date", "content-length", "etag")


@pytest.mark.requirement("HH-21")
def test_head_is_answered_as_get_without_the_body_at_each_route(hub):
    paths = [path for path, methods in page(hub)["paths"].items() if "get" in methods and path != MESSAGES]
    assert {"/healthz", "/readyz", "/metrics", *STREAMS} <= set(paths)
    for path in [*paths, "/docs", "/openapi.json"]:
        url = path.replace("{", "").replace("}", "")
        with hub.operator.stream("GET", url) as got:
            expected = {name: value for name, value in got.headers.items() if name not in CHANGING}
        head = hub.operator.head(url)
        found = {name: value for name, value in head.headers.items() if name not in CHANGING}
        assert (head.status_code, head.content) == (got.status_code, b""), path
        expected.pop("transfer-encoding", None)
        assert found == expected, path
        # The connection goes on behind it, also behind the head of a stream.
        assert hub.operator.get("/healthz").status_code == 200


@pytest.mark.requirement("HH-21")
def test_head_takes_no_message(hub):
    name, token = hub.principal("worker")
    assert hub.operator.post(MESSAGES, json={"recipient": name, "type": "x"}).is_success
    mine = hub.client(token)
    refused = mine.head(MESSAGES, params={"limit": 1})
    assert refused.status_code == 405
    assert "HEAD" not in refused.headers["allow"]
    assert len(mine.get(MESSAGES).json()["messages"]) == 1


@pytest.mark.requirement("HH-27")
def test_pages_of_other_sites_get_no_permission_at_any_route(hub):
    asked = {"Origin": "https://pages.example", "Access-Control-Request-Method": "POST"}
    for path, methods in page(hub)["paths"].items():
        url = path.replace("{", "").replace("}", "")
        preflight = hub.operator.options(url, headers=asked)
        assert preflight.status_code == 405, path
        found = [*preflight.headers]
        if "get" in methods and path != MESSAGES:
            with hub.operator.stream("GET", url, headers=asked) as answer:
                found += answer.headers
        assert not [name for name in found if name.startswith("access-control-")], path
