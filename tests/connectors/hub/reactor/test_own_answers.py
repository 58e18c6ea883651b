"""The agreement between a gateway and its reactor on who posts an answer."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

import connectors.hub.reactor.own_records as module
from connectors.hub.reactor.own_records import OwnAnswers
from connectors.log.publisher import Append
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.mailbox_bodies import HandledMessage, MailboxLease, MessagesHandled
from schemas.streams.mailboxes.message import Message, MessageRow
from tests.broker_processes import wait_until
from tests.connectors.hub.live.test_live_view import opened
from tests.connectors.hub.reactor.test_reactor import committed, reacting
from tests.connectors.hub.reactor.test_reactor import settings as settings  # a fixture
from tests.jobs.topic_load import append_all
from trunkline_agent.errors import BackboneUnreachable

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


@pytest.mark.parametrize("is_appended", [True, False])
def test_the_reactor_posts_an_answer_only_if_its_gateway_has_not_appended_it(
    settings: Settings, keyring: Keyring, is_appended: bool
) -> None:
    by = {"door": "xml", "principal": "operator"}
    said = {"message_id": "m1", "from": "ann", "to": "fast", "kind": "ask", "body": "?"}
    answer = {**said, "message_id": "a1", "from": "fast", "to": "ann"}
    handled = HandledMessage(message_id="m1", request_id="l1", answers=[Message.model_validate(answer)])
    ack = MessagesHandled(to="fast", messages=[handled]).record(**by)
    own, lost = OwnAnswers(), Append()
    lost.set_exception(BackboneUnreachable("Kafka does not answer"))
    own.begin(ack.ce_id)
    own.end(ack.ce_id, [] if is_appended else [lost])
    with opened(settings, keyring) as view, reacting(settings, view, own_answers=own):
        posted = Message.model_validate(said).record(door="http", principal="ann")
        append_all(settings, [posted, MailboxLease(to="fast", request_id="l1", limit=1).record(**by), ack])
        if not is_appended:
            wait_until(lambda: view.get(MessageRow, "default/ann/a1"), 40, "the answer")
        wait_until(lambda: {n: e for n, e in view.next_offsets().items() if e} == committed(settings), 40)
        assert (view.get(MessageRow, "default/ann/a1") is None) == is_appended
        assert view.get(MessageRow, "default/fast/m1").status == "claimed"
