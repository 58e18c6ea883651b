"""The routes that are no declared operations: malformed and long bodies, and methods that they do not have."""

from __future__ import annotations

import re

import pytest

from tests.matrix.asking import PATH_WORDS, Watched
from tests.matrix.ground import HUB, Ground
from tests.matrix.memory_gateway import BODY_LIMIT

pytestmark = pytest.mark.requirement("HH-12")

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


@pytest.mark.parametrize("path", [f"{HUB}/pump/{what}" for what in ("started", "lease", "settle", "history")])
def test_a_body_that_no_route_takes_is_refused_and_recorded(ground: Ground, path: str) -> None:
    watched, expected = Watched(ground), []
    for body, status, reason in (
        (b"{", 400, "malformed"),
        (b'{"unknown-field": 1}', 400, "malformed"),
        (b" " * (BODY_LIMIT + 1), 413, "too_large"),
    ):
        answer = ground.gateway.ask("POST", path, body)
        assert answer.said == (status, reason), body[:30]
        assert "unknown-" not in answer.document["message"]
        expected.append((reason, "operator", f"POST {path}"))
    assert watched.refused == expected
    assert not watched.records


def test_each_path_answers_405_to_each_other_method_and_names_its_own(ground: Ground) -> None:
    paths = ground.gateway.app.openapi()["paths"]
    by_route = {route: {method.upper() for method in methods} for route, methods in paths.items()}
    patterns = {re.compile(re.sub(r"\{\w+\}", "[^/]+", route)): own for route, own in by_route.items()}
    for route, own in by_route.items():
        url = route.format(**PATH_WORDS)
        taken = set.union(*(methods for pattern, methods in patterns.items() if pattern.fullmatch(url)))
        for method in sorted(set(METHODS) - taken):
            answer = ground.gateway.ask(method, url)
            assert answer.said == (405, "method_not_allowed"), (method, url)
            # HEAD goes with GET, and is in no document.
            assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == own, (method, url)
            assert answer.document.keys() == {"reason", "message"}
