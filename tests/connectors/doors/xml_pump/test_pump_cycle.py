"""Messages through a real gateway and a real pump: who asks, who answers, what a handler may do wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import BrokerProcess, wait_until
from tests.connectors.doors.xml_pump.pump_handlers import RELEASE, SPACE
from tests.connectors.doors.xml_pump.pump_stack import (
    HANDLERS,
    PumpStack,
    document,
    element,
    listener,
    pump_stack,
)

SAMPLE: dict[str, Any] = yaml.safe_load((PROJECT_ROOT / "conf" / "organism.yaml").read_text())
SAMPLE_SPACE = "urn:trunkline:sample:1"
META = "urn:trunkline:meta:1"
ORGANISM = {
    **SAMPLE,
    "listeners": [
        *SAMPLE["listeners"],
        listener("fast", "search", "fast"),
        listener("slow", "search", "slow"),
        listener("relay", "begin", "relay"),
        listener("rough", "rough", "rough", timeout_s=0.5),
        listener("worker", "work", "work", tools=["fast", "meta"]),
    ],
    "agents": [
        *SAMPLE["agents"],
        {
            "name": "improviser",
            "type": "llm",
            "root_tag": "improvise",
            "namespace": SPACE,
            "model": "none",
            "client": f"{HANDLERS}:Improviser",
            "visible_tools": ["fast"],
        },
    ],
}


@pytest.fixture(scope="module")
def stack(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PumpStack]:
    """A gateway and one pump."""
    with pump_stack(kafka_broker, tmp_path_factory.mktemp("pump"), ORGANISM) as found:
        found.start_pump()
        yield found


@pytest.mark.requirement("XP-04")
@pytest.mark.requirement("XP-05")
@pytest.mark.requirement("XP-06")
@pytest.mark.requirement("XP-07")
def test_of_two_that_are_asked_the_fast_one_is_heard_before_the_slow_one_is_done(stack: PumpStack):
    stack.forget(RELEASE, "relay.jsonl", "fast.jsonl", "slow.jsonl", "slow_done.jsonl")
    asker = stack.poster()
    asker.send(element("begin", query="logs"))

    (first,) = asker.answers(1)
    assert (first["sender"], first["type"]) == ("relay", "heard")
    assert "<source>fast</source>" in first["text"]
    wait_until(lambda: stack.notes("slow"), what="the slow one has begun")
    assert stack.notes("slow_done") == []

    (stack.folder / RELEASE).touch()
    assert "<source>slow</source>" in asker.answers(2)[1]["text"]
    begun, *replies = stack.notes("relay")
    assert (begun["sender"], begun["verified"], begun["is_reply"]) == (asker.name, True, False)
    assert [(one["sender"], one["is_reply"]) for one in replies] == [("fast", True), ("slow", True)]
    # The asking listener knows one thread, and each asked listener another.
    (fast,), (slow,) = stack.notes("fast"), stack.notes("slow")
    assert {one["thread"] for one in replies} == {begun["thread"]}
    assert len({begun["thread"], fast["thread"], slow["thread"]}) == 3
    assert fast["sender"] == slow["sender"] == "relay"


ROUGH = {
    "raise": "it raised ValueError",
    "exit": "it raised SystemExit",
    "hang": "no answer within 0.5 s",
    "stubborn": "no answer within 0.5 s",
    "text": "its answer cannot be sent: the answer is text without any payload element",
    "type": "a handler answers with bytes or None, not with str",
    "large": "its answer is too large",
    "doctype": "its answer is no XML",
    "many": "its answer is too large: 101 payloads",
}


@pytest.mark.requirement("XP-13")
def test_who_asks_a_handler_that_fails_in_any_way_is_told_and_the_pump_goes_on(stack: PumpStack):
    stack.forget(RELEASE)
    asker, others = stack.poster(), stack.poster()
    pump = stack.pumps[0].process.pid
    for how in ROUGH:
        asker.send(element("rough", how=how))
        others.send(element("work", number=1))
    told = asker.answers(len(ROUGH))
    assert {(one["sender"], one["type"]) for one in told} == {("rough", "huh")}
    for how, why in ROUGH.items():
        assert sum(f"the listener rough failed: {why}" in one["text"] for one in told) >= 1, how
    assert len(told) == len(ROUGH)
    assert all("secret" not in one["text"] for one in told)
    assert {one["type"] for one in others.answers(len(ROUGH))} == {"worked"}
    asker.send(element("rough", how="task"))
    assert asker.answers(len(ROUGH) + 1)[-1]["type"] == "worked"
    wait_until(lambda: '"event": "task_failed"' in stack.pumps[0].log(), what="its failure is noted")
    (stack.folder / RELEASE).touch()
    assert stack.pumps[0].process.poll() is None
    assert {one["pid"] for one in stack.notes("rough")} == {pump}
    assert "a secret that nobody is to see" not in stack.pumps[0].log()


@pytest.mark.requirement("XP-02")
def test_a_payload_that_is_none_of_the_listeners_is_answered_with_what_would_be_right(stack: PumpStack):
    asker = stack.poster()
    asker.send(element("work", number="many"))
    (told,) = asker.answers(1)
    assert told["type"] == "huh"
    assert "<step>payload</step>" in told["text"]
    assert "&lt;work xmlns=" in told["text"]  # an example
    schema = stack.settings.data_path / "listener_schemas" / "worker" / "work" / "v1.xsd"
    assert 'name="work"' in schema.read_text()


@pytest.mark.requirement("XP-09")
def test_a_text_of_another_door_gets_the_same_answer_and_a_payload_of_another_door_is_taken(stack: PumpStack):
    asker = stack.poster()
    # An agent over MCP cannot choose the kind: it is always `message`.
    sent = [("greeting", "hello"), ("work", element("work", number=5)), ("message", element("work", number=6))]
    for kind, said in sent:
        body = {"recipient": "worker", "type": kind, "payload": {"text": said}}
        answer = asker.client.post("/api/hub/messages", json=body)
        assert answer.status_code == 200, answer.text
    answers = asker.answers(3)
    assert [one["type"] for one in answers].count("worked") == 2, answers
    (told,) = [one["text"] for one in answers if one["type"] == "huh"]
    assert "&lt;work xmlns=" in told
    worked = [one["text"] for one in answers if one["type"] == "worked"]
    assert sorted(re.findall("<number>(.*?)</number>", " ".join(worked))) == ["5", "6"]
    assert re.findall("<tools>(.*?)</tools>", worked[0]) == ["fast", "meta"]


@pytest.mark.requirement("XP-10")
def test_who_listens_for_boot_hears_of_each_start(stack: PumpStack):
    wait_until(lambda: '"event": "booted"' in stack.pumps[0].log(), what="the message of the start")


@pytest.mark.requirement("XP-09")
@pytest.mark.requirement("XP-15")
def test_a_researcher_asks_its_tools_and_reports_what_each_has_said(stack: PumpStack):
    asker = stack.poster()
    question = f'<research xmlns="{SAMPLE_SPACE}"><question>What is 6 * 7?</question></research>'
    asker.post(document(question)).raise_for_status()
    (report,) = asker.answers(1)
    assert (report["sender"], report["type"]) == ("researcher", "report")
    findings = dict(re.findall(r'<finding by="(.*?)">(.*?)</finding>', report["text"]))
    assert "&lt;value&gt;42&lt;/value&gt;" in findings["calculator"]
    assert "How the log came to be" in findings["archive_search"]
    assert "How the log came to be" not in findings["index_search"]
    # Three answers led to one report.
    thread = next(
        one["body"]["parent_thread"]
        for one in stack.records()
        if one["type"] == "message.posted" and one["body"]["kind"] == "calculate"
    )
    said = stack.operator.post(
        "/api/hub/pump/history", json={"listener": "researcher", "thread": thread, "limit": 100}
    ).json()["messages"]
    kinds = sorted(one["kind"] for one in said)
    assert kinds == sorted(["research", "search", "search", "calculate", "found", "found", "result", "report"])


@pytest.mark.requirement("XP-09")
def test_to_a_model_only_what_it_was_given_exists(stack: PumpStack):
    asker = stack.poster()
    asker.send(element("improvise", text="go"))
    (report,) = asker.answers(1)
    assert report["type"] == "text"
    assert "system said &lt;huh" in report["text"]
    assert "a name that you were given" in report["text"]
    assert {tuple(one["tools"]) for one in stack.notes("model")} == {("fast",)}
    assert [one["roles"] for one in stack.notes("model")] == [["user"], ["user", "tool"]]


def ask_meta(client: httpx.Client, question: str) -> None:
    """Ask which listeners there are."""
    body = document(f'<meta xmlns="{META}">{question}</meta>')
    client.post("/messages", content=body, headers={"Content-Type": "application/xml"}).raise_for_status()


@pytest.mark.requirement("XP-14")
def test_questions_about_the_listeners_are_answered_as_the_organism_says(stack: PumpStack):
    asker = stack.poster()
    ask_meta(asker.client, "<list/>")
    (listed,) = asker.answers(1)
    assert (listed["sender"], listed["type"]) == ("meta", "listeners")
    assert 'name="calculator"' in listed["text"]
    ask_meta(asker.client, '<describe listener="calculator"/>')
    assert asker.answers(2)[1]["type"] == "huh"

    ask_meta(stack.operator, '<describe listener="calculator"/>')

    def described() -> str:
        read = stack.operator.get("/api/hub/messages").json()["messages"]
        return next((one["payload"]["text"] for one in read if one["type"] == "description"), "")

    text = wait_until(described, what="the operator is told")
    assert "&lt;xs:schema" in text
    assert 'name="calculator"' in text
