"""The tools of the agents' MCP door: each repeated, malformed, too long, unsigned, and while Kafka is away.

Each call is sent by both ways, as in `test_operations.py`. A tool over an operation answers as the operation.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from connectors.doors.mcp_tools.agents.operation_tools import ARGUMENTS, ONLY_READS
from schemas.streams.agents.agent_registry import AgentCalled
from tests.agent_signatures import signed_headers
from tests.connectors.doors.mcp_tools.signed_calls import call_body
from tests.matrix.asking import WAYS, leaves
from tests.matrix.bounds import bounds_in_table, bounds_of, wrong_values
from tests.matrix.ground import Ground, fresh
from tests.matrix.memory_gateway import BODY_LIMIT
from tests.matrix.tool_samples import CAREFUL, CHANGES, KEY, KEYED, SAMPLES, Agents, Effects, call_of

pytestmark = [pytest.mark.requirement(one) for one in ("AM-04", "ST-95")]

each_tool = pytest.mark.parametrize("tool", SAMPLES)


@pytest.fixture(scope="module")
def agents(ground: Ground) -> Agents:
    """The two agents."""
    return Agents(ground)


def test_each_tool_has_a_sample_and_no_other() -> None:
    assert set(SAMPLES) == set(ARGUMENTS)


@each_tool
def test_a_sample_has_each_argument_and_its_bounds_are_those_of_the_table(agents: Agents, tool: str) -> None:
    names = {str(one.alias) for one in ARGUMENTS[tool].model_fields.values()}
    assert {*call_of(agents, tool), *SAMPLES[tool].lacks, KEY} == names | {KEY}
    schema = ARGUMENTS[tool].model_json_schema()
    found = list(bounds_of(schema, schema.get("$defs", {})))
    assert found == [(name, *(bounds_in_table(tool, name) or ())) for name, *_ in found]


@each_tool
def test_a_call_has_the_same_answer_by_both_ways_and_its_arguments_reach_the_log(
    agents: Agents, tool: str
) -> None:
    found = []
    for way in WAYS:
        arguments, effects = call_of(agents, tool), Effects(agents.ground)
        made = len(effects.records)
        agents.ground.gateway.ask("GET", "/healthz")
        del agents.ground.gateway.begun[:]
        content = agents.call(tool, arguments, way)
        agents.ground.gateway.ask("GET", "/healthz")
        assert agents.ground.gateway.begun == (["answered"] if not way and tool not in CAREFUL else [])
        assert ("reason" in content) == (tool == "read_blob")
        texts = [f"{record.stream} {record.value.decode()}" for record in effects.records[made:]]
        assert bool(texts) == (tool in CHANGES)
        for name, value in leaves(arguments):
            if texts and name in LOGGED:
                thousandfold = str(value * 1000) if type(value) is int else str(value)
                assert str(value) in " ".join(texts) or thousandfold in " ".join(texts), name
        found.append(content.keys())
    assert found[0] == found[1]


# Arguments that are in the record as they are, or as milliseconds.
LOGGED = (
    "message",
    "subject",
    "priority",
    "expiresInSeconds",
    "deliverAfterSeconds",
    "inReplyTo",
    "thread",
    "topic",
    "targetAgentId",
)
LOGGED += ("reason", "leaseSeconds", "messageIds", "messageId", "contentType", "status", "capabilities")


@pytest.mark.parametrize("tool", KEYED)
@pytest.mark.parametrize("first", WAYS)
def test_a_repeated_call_has_one_effect_and_the_same_answer(agents: Agents, tool: str, first: bool) -> None:
    arguments = {**call_of(agents, tool), KEY: fresh("key")}
    effects = Effects(agents.ground)
    answer = agents.call(tool, arguments, first)
    made = len(effects.records)
    assert made > 0 and "reason" not in answer, answer
    for way in (not first, first):
        again = agents.call(tool, arguments, way)
        assert {**again, **_changed(tool, answer)} == answer
    assert len(effects.records) == made
    # The key of another agent is another one.
    if tool in ("send_to_agent", "publish_message", "subscribe"):
        assert "reason" not in agents.call(tool, arguments, first, agents.bo)
        assert len(effects.records) > made


def _changed(tool: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in SAMPLES[tool].changes if name in answer}


@pytest.mark.long
@each_tool
def test_a_malformed_call_is_an_error_with_a_reason_and_changes_nothing(agents: Agents, tool: str) -> None:
    good, schema = call_of(agents, tool), ARGUMENTS[tool].model_json_schema()
    effects, bad = Effects(agents.ground), [{**good, "noSuchArgument": 1}]
    made = len(effects.records)
    bad += [{name: one for name, one in good.items() if name != left} for left in schema.get("required", ())]
    for name, kind in schema.get("properties", {}).items():
        values = wrong_values(kind, schema.get("$defs", {}))
        # The length of a message is measured in bytes, and a name of a content is checked later.
        free = name in FREE
        bad += [{**good, name: value} for value in values if not (free and value and isinstance(value, str))]
    for arguments in bad:
        found = agents.both(tool, arguments)
        assert found.get("reason") == "malformed" and found["message"], (arguments, found)
        assert not re.search(r"no.?such|x{9}|a b|[\x00-\x1f]", found["message"], re.IGNORECASE), found
    assert len(effects.records) == made


FREE = ("message", "content")


@pytest.mark.parametrize("tool", [name for name, one in SAMPLES.items() if one.unknown is not None])
def test_an_unknown_name_is_an_error(agents: Agents, tool: str) -> None:
    unknown = SAMPLES[tool].unknown or {}
    effects, arguments = Effects(agents.ground), {**call_of(agents, tool), **unknown}
    made = len(effects.records)
    found = agents.both(tool, arguments)
    assert found["reason"] in ("not_found", "unknown_stream", "unknown_recipient")
    assert len(effects.records) == made


@pytest.mark.parametrize("tool", ["send_to_agent", "ask_agent", "broadcast_message", "publish_message"])
def test_a_message_of_the_limit_is_sent_and_one_byte_more_is_too_large(agents: Agents, tool: str) -> None:
    for way in WAYS:
        arguments = call_of(agents, tool)
        assert "reason" not in agents.call(tool, {**arguments, "message": "x" * BODY_LIMIT}, way)
        long = {**arguments, "message": "x" * (BODY_LIMIT - 1) + "ä"}
        assert agents.call(tool, long, way)["reason"] == "too_large"


@pytest.mark.parametrize("tool", [name for name in CHANGES if name != "upload_blob"])
@pytest.mark.parametrize("careful", WAYS)
def test_while_kafka_is_away_nothing_is_done_and_later_once(agents: Agents, tool: str, careful: bool) -> None:
    log, appender = agents.ground.gateway.log, agents.ground.gateway.hub.appender
    arguments, effects = call_of(agents, tool), Effects(agents.ground)
    arguments |= {KEY: fresh("key")} if tool in KEYED else {}
    made = len(effects.records)
    for known in (True, False):
        log.is_away, appender._away = True, "Kafka is away" if known else None
        try:
            answer = agents.post(call_body(tool, **arguments), careful)
        finally:
            log.is_away, appender._away = False, None
        assert answer.said == (503, "unreachable")
        assert re.fullmatch(r"[1-9]\d*", answer.headers["retry-after"])
    # Kafka has the record of the call, and not the one behind it.
    log.is_away, log.passes = True, AgentCalled.TYPE
    try:
        assert agents.call(tool, arguments, careful)["reason"] == "unreachable"
    finally:
        log.is_away, log.passes = False, ""
    assert len(effects.records) == made
    first = agents.call(tool, arguments, careful)
    done = len(effects.records)
    assert "reason" not in first and done > made
    assert {**agents.call(tool, arguments, careful), **_changed(tool, first)} == first
    assert len(effects.records) == done


_pool = ThreadPoolExecutor(1)


@pytest.mark.parametrize("tool", [name for name in CHANGES if name != "upload_blob"])
@pytest.mark.parametrize("careful", WAYS)
def test_no_answer_comes_before_the_log_has_the_record(agents: Agents, tool: str, careful: bool) -> None:
    log, arguments = agents.ground.gateway.log, call_of(agents, tool)
    log.is_held, log.passes = True, AgentCalled.TYPE
    try:
        answer = _pool.submit(agents.call, tool, arguments, careful)
        while not log.held and not answer.done():
            time.sleep(0.001)
        assert agents.ground.gateway.ask("GET", "/healthz").status == 200
        assert not answer.done(), answer.result()
        log.release()
        assert "reason" not in answer.result(20)
    finally:
        log.passes = ""
        log.release()


def test_the_record_of_a_call_comes_before_its_effect(agents: Agents) -> None:
    log, arguments = agents.ground.gateway.log, call_of(agents, "send_to_agent")
    for way in WAYS:
        before = len(log.records)
        agents.call("send_to_agent", arguments, way)
        assert [record.type for record, _ in log.records[before:]] == [AgentCalled.TYPE, "message.posted"]


def bad_signatures(agents: Agents, body: bytes) -> Iterator[dict[str, str]]:
    """Return headers in the place of right ones."""
    other = signed_headers(agents.ann, agents.key_of(agents.bo), b"{}")
    yield other
    yield {**other, next(iter(other)): "nobody-of-this-name"}
    yield signed_headers(agents.ann, agents.key_of(agents.ann), body, str(int(time.time()) - 301))
    yield dict.fromkeys(other, "")


@each_tool
def test_a_call_with_another_signature_is_refused_and_a_change_needs_a_new_one(
    agents: Agents, tool: str
) -> None:
    body, effects = call_body(tool, **call_of(agents, tool)), Effects(agents.ground)
    made = len(effects.records)
    for changed in bad_signatures(agents, body):
        for way in WAYS:
            refused = len(effects.refused)
            assert agents.post(body, way, **changed).said == (403, "unauthorized")
            assert len(effects.refused) == refused + 1
    assert len(effects.records) == made
    for first in WAYS:
        body = call_body(tool, **call_of(agents, tool))
        signed = signed_headers(agents.ann, agents.key_of(agents.ann), body)
        assert agents.post(body, first, **signed).status == 200
        for way in WAYS:
            again = agents.post(body, way, **signed)
            assert again.said == ((200, None) if tool in ONLY_READS else (403, "unauthorized")), again


@pytest.mark.parametrize("tool", ["send_to_agent", "broadcast_message", "publish_message"])
def test_a_call_over_the_limit_is_refused_with_the_time_to_wait(agents: Agents, tool: str) -> None:
    agents.ground.do("POST", f"/limits/name/{agents.ann}", {"messages_per_minute": 1})
    try:
        arguments, effects = call_of(agents, tool), Effects(agents.ground)
        for way in WAYS:
            for _ in range(2):
                found = agents.call(tool, arguments, way)
            assert found["reason"] == "rate_limited" and found["retryAfterSeconds"] >= 1
        assert {one[0] for one in effects.refused} == {"rate_limited"}
    finally:
        agents.ground.do("POST", f"/limits/name/{agents.ann}", {})


@pytest.mark.parametrize("careful", WAYS)
def test_a_broadcast_has_the_number_of_full_mailboxes(agents: Agents, careful: bool) -> None:
    before = agents.call("broadcast_message", {"message": "x"}, careful, agents.bo)
    agents.ground.do("POST", f"/limits/name/{agents.ann}", {"pending_most": 1})
    try:
        after = agents.call("broadcast_message", {"message": "x"}, careful, agents.bo)
        assert after["full"] == before["full"] + 1
        assert after["recipientCount"] == before["recipientCount"] - 1
    finally:
        agents.ground.do("POST", f"/limits/name/{agents.ann}", {})
