"""The hub client of `./trunkline prove`: it compares repeated answers, and takes none that nobody may give."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.connectors.agent_sdk.small_server import always, answer, serving
from tests.faults.prove.hub_client import Clock, HubClient
from tests.faults.prove.load_messages import HANNA, HubReader
from tests.faults.prove.oracle import Oracle

Serve = Callable[[list[tuple[int, object]]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that give these answers, status and document, in turn, and the last one for ever."""
    with ExitStack() as servers:

        def start(answers: list[tuple[int, object]]) -> str:
            said = (answer(status, json.dumps(document).encode()) for status, document in answers)
            return servers.enter_context(serving(always(*said))).access.url

        yield start


@pytest.fixture
def ask() -> Iterator[Callable[..., HubClient]]:
    """Makes clients of these gateways."""
    clients: list[HubClient] = []

    def client(*urls: str) -> HubClient:
        clock = Clock()
        clock.begin(5.0, 5.0)
        clients.append(HubClient(list(urls), "token", clock, seed=1))
        return clients[-1]

    yield client
    for one in clients:
        one.close()


def test_a_repeated_request_with_another_answer_is_said(serve: Serve, ask: Callable[..., HubClient]) -> None:
    same = ask(serve([(201, {"id": 1})]))
    assert same.ask("GET", "/", duplicates=1.0).status == 201
    assert same.repeats == 1
    for again in ((201, {"id": 2}), (200, {"id": 1})):
        with pytest.raises(AssertionError, match="sent again"):
            ask(serve([(201, {"id": 1}), again])).ask("GET", "/", duplicates=1.0)
    # An empty drain takes nothing, and is no other one when something has come.
    drained = ask(serve([(200, {"messages": []}), (200, {"messages": [{"id": "m1"}]})]))
    found = drained.ask("GET", "/", duplicates=1.0, says=lambda answer: answer.json()["messages"])
    assert found.json()["messages"] == [{"id": "m1"}]
    # Where it stands in the log is not what it says.
    other = ask(serve([(201, {"id": 1, "position": 4}), (201, {"id": 1, "position": 7})]))
    other.ask("GET", "/", duplicates=1.0, says=lambda answer: answer.json()["id"])


def test_only_beside_a_second_gateway_may_one_not_know_what_was_acknowledged(
    serve: Serve, ask: Callable[..., HubClient]
) -> None:
    not_known: tuple[int, object] = (404, {})
    assert ask(serve([not_known, (200, {})])).ask_known("GET", "/").status == 404
    urls = [serve([not_known, (200, {})]), serve([not_known, (200, {})])]
    shared = ask(*urls)
    assert shared.ask_known("GET", "/").status == 200
    while not shared.answers_elsewhere:
        shared.ask("GET", "/")


def test_a_drain_that_is_refused_ends_the_reader(
    serve: Serve, ask: Callable[..., HubClient], tmp_path: Path
) -> None:
    clock = Clock()
    clock.begin(5.0, 5.0)
    for status in (404, 500):
        reader = HubReader(ask(serve([(status, {})])), HANNA, Oracle(tmp_path / "oracle.jsonl"), clock)
        with pytest.raises(AssertionError, match="a drain was refused"):
            reader.run()
