"""Requests while Kafka is away, hangs or loses an answer: nothing half done, and once it is back each once."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.matrix.asking import CHANGES, KEYED, UNLOGGED, WAYS, Watched, address, both, operation
from tests.matrix.ground import Caller, Ground, Request, fresh
from tests.matrix.samples import SAMPLES
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE

pytestmark = pytest.mark.requirement("HH-12")

_pool = ThreadPoolExecutor(1)
# They append a second record behind the first.
SEVERAL = ("set_limits", "broadcast_message")


def test_an_empty_mailbox_is_not_called_empty_while_kafka_is_away(ground: Ground) -> None:
    caller, appender = ground.principal("w"), ground.gateway.hub.appender
    for away, said in (("Kafka is away", (503, "unreachable")), (None, (200, None))):
        appender._away = away
        assert both(ground, caller, "drain_messages", Request({})).said == said


@pytest.mark.parametrize("name", [one for one in CHANGES if one not in UNLOGGED] + ["drain_messages"])
@pytest.mark.parametrize("careful", WAYS)
def test_while_kafka_is_away_nothing_is_done_and_later_once(ground: Ground, name: str, careful: bool) -> None:
    sample, asked, log = SAMPLES[name], operation(ground, name), ground.gateway.log
    caller, appender = ground.operator, ground.gateway.hub.appender
    for known in (True, False):
        request, watched = sample.request(ground, caller), Watched(ground)
        key = {asked.key_header.decode(): fresh("key")}
        made = len(watched.records)
        log.is_away, appender._away = True, "Kafka is away" if known else None
        try:
            answer = ground.ask(caller, name, request, careful=careful, **key)
        finally:
            log.is_away, appender._away = False, None
        assert answer.said == (503, "unreachable"), answer
        assert re.fullmatch(r"[1-9]\d*", answer.headers["retry-after"])
        assert answer.verdict is None
        assert len(watched.records) == made
        if not sample.is_alone:
            continue
        # The log has it, but the answer of Kafka is lost.
        log.forgets_to_answer = not known
        try:
            answer = ground.ask(caller, name, request, careful=careful, **key)
        finally:
            log.forgets_to_answer = False
        if known:
            assert (answer.status, answer.verdict) == (sample.status, ACCEPTED if sample.is_known else None)
        else:
            assert answer.said == (503, "unreachable"), answer
        done = len(watched.records)
        assert done > made
        answer = ground.ask(caller, name, request, careful=careful, **key)
        assert answer.status == sample.status, answer
        if name not in SEVERAL:
            assert answer.verdict == (DUPLICATE if sample.is_known else None)
            assert len(watched.records) == done


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in CHANGES and name != "drain_messages"])
def test_a_reading_request_needs_no_kafka(ground: Ground, name: str) -> None:
    request = SAMPLES[name].request(ground, ground.operator)
    before = both(ground, ground.operator, name, request)
    log, appender = ground.gateway.log, ground.gateway.hub.appender
    log.is_away, appender._away = True, "Kafka is away"
    try:
        assert both(ground, ground.operator, name, request) == before
    finally:
        log.is_away, appender._away = False, None
    assert before.status == SAMPLES[name].status
    assert before.verdict is None


@pytest.mark.parametrize("name", SAMPLES)
def test_a_refusal_needs_no_kafka(ground: Ground, name: str) -> None:
    stranger, log, appender = Caller("", "", "nobodys-token"), ground.gateway.log, ground.gateway.hub.appender
    requests = [(stranger, address(ground, name))]
    if operation(ground, name).BODY is not None:
        requests.append((ground.operator, address(ground, name)._replace(body=b"[]")))
    if SAMPLES[name].reach("v") is None:
        requests.append((ground.caller("v"), SAMPLES[name].request(ground, ground.operator)))
    before = [both(ground, caller, name, request) for caller, request in requests]
    assert {answer.status for answer in before} <= {400, 401, 403}
    log.is_away, appender._away = True, "Kafka is away"
    try:
        assert [both(ground, caller, name, request) for caller, request in requests] == before
    finally:
        log.is_away, appender._away = False, None


@pytest.mark.parametrize("name", [one for one in KEYED if SAMPLES[one].is_alone])
@pytest.mark.parametrize("careful", WAYS)
def test_no_answer_comes_before_the_log_has_the_record(ground: Ground, name: str, careful: bool) -> None:
    log, request = ground.gateway.log, SAMPLES[name].request(ground, ground.operator)
    log.is_held = True
    try:
        answer = _pool.submit(ground.ask, ground.operator, name, request, careful=careful)
        while not log.held and not answer.done():
            time.sleep(0.001)
        # The gateway is not held itself, and answers others.
        assert ground.gateway.ask("GET", "/healthz").status == 200
        assert not answer.done(), answer.result()
        log.release()
        assert answer.result(20).status == SAMPLES[name].status
    finally:
        log.release()
