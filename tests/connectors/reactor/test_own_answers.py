"""The agreement between a gateway and its reactor on who posts an answer."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

import connectors.reactor.own_answers as module
from connectors.log.publisher import Append
from connectors.reactor.own_answers import OwnAnswers

pytestmark = pytest.mark.requirement("ST-52")


def test_the_reactor_gets_the_appends_of_its_own_gateway_once() -> None:
    own, appends = OwnAnswers(), [Append()]
    own.begin("ack")
    own.end("ack", appends)
    assert own.wait("ack", 0.0) == appends
    assert own.wait("ack", 0.0) is None
    assert own.wait("of another gateway", 0.0) is None


def test_the_reactor_waits_until_the_gateway_has_appended_the_answers() -> None:
    own, appends, found = OwnAnswers(), [Append()], Future()
    own.begin("ack")
    reactor = threading.Thread(target=lambda: found.set_result(own.wait("ack", 20)))
    reactor.start()
    own.end("ack", appends)
    assert found.result(20) == appends
    reactor.join(20)


@pytest.mark.parametrize("trouble", ["not appended", "no answer in time", "forgotten"])
def test_the_answers_are_left_to_the_reactor(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnAnswers()
    monkeypatch.setattr(module, "_KEPT", 1)
    own.begin("ack")
    if trouble == "not appended":
        own.end("ack", None)
    elif trouble == "forgotten":
        own.begin("newer")
        own.end("ack", [Append()])
    assert own.wait("ack", 0.01) is None
    own.end("ack", [Append()])  # too late, and without effect
    assert own.wait("ack", 0.01) is None
