"""A language model's listener: what the model is told, how its calls become messages, what its text becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from connectors.doors.xml_pump import payload
from connectors.doors.xml_pump.dispatcher import Dispatcher
from connectors.doors.xml_pump.handlers import ConversationMessage, HandlerError, handles
from connectors.doors.xml_pump.listener_table import (
    ChatMessage,
    Completion,
    TableMaker,
    TokenRate,
    ToolCall,
    client_of,
)
from connectors.doors.xml_pump.pipeline import Pipeline
from connectors.doors.xml_pump.special_listeners import arguments_as_xml, conversation
from connectors.plumbing.xml_payloads.deliveries import Done, leased_from, listener_from
from connectors.plumbing.xml_payloads.payload_types import payload_type_of
from connectors.plumbing.xml_wire.documents import Faulty, XmlLimits
from connectors.tools.sample_organism.listeners import NAMESPACE

SPACE = "urn:example:llm:1"
LIMITS = XmlLimits()


@payload("order", namespace=SPACE)
@dataclass
class Order:
    """Something to fetch."""

    what: str
    count: int = 1
    labels: list[str] = field(default_factory=list)
    urgent: bool = False


@handles(Order)
async def fetch(message: Any) -> bytes | None:
    """Fetches nothing."""
    return None


@payload("bare", namespace=SPACE)
@dataclass
class Bare:
    what: str


@handles(Bare)
async def fetch_bare(message: Any) -> bytes | None:
    """Fetches nothing."""
    return None


@dataclass
class Scripted:
    """Says what the test wants, and remembers what it was told."""

    says: Completion = field(default_factory=Completion)
    told: list[Sequence[ChatMessage]] = field(default_factory=list)
    tools: list[Mapping[str, Any]] = field(default_factory=list)

    async def complete(
        self,
        model: str,
        system_prompt: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> Completion:
        """The next."""
        assert (model, system_prompt) == ("m", "be brief")
        self.told.append(messages)
        self.tools = list(tools)
        return self.says


CLIENT = Scripted()


def said(
    message_id: str, sender: str, body: str, *, to: str | None = None, about: str | None = None
) -> ConversationMessage:
    return ConversationMessage(message_id, sender, to, "kind", body, sender == "model", about)


@dataclass
class History:
    """Return a message of the conversation."""

    messages: Sequence[ConversationMessage] = ()

    async def history(self, listener: str, thread: str, limit: int) -> Sequence[ConversationMessage]:
        """All of it."""
        assert (listener, thread) == ("model", "t")
        return self.messages


LISTENERS = (
    {"listener": "fetcher", "root_tag": "order", "namespace": SPACE, "handler": f"{__name__}:fetch"},
    {"listener": "person", "root_tag": "note", "namespace": "urn:example:note", "type": "human"},
    {"listener": "secret", "root_tag": "order", "namespace": SPACE, "handler": f"{__name__}:fetch"},
    {
        "listener": "model",
        "root_tag": "question",
        "namespace": SPACE,
        "type": "llm",
        "visible_tools": ["fetcher", "person"],
        "options": f'{{"model":"m","system_prompt":"be brief","client":"{__name__}:CLIENT"}}',
    },
)


def deliver(
    says: Completion, folder: Path, history: Sequence[ConversationMessage] = (), spent: Any = None
) -> Done:
    """Return the outcome of a message to the model, which answers this."""
    CLIENT.says = says
    CLIENT.told.clear()
    maker = TableMaker(folder, LIMITS)
    table = maker.make(1, [listener_from(row) for row in LISTENERS])
    dispatcher = Dispatcher(
        History(history), maker.system_pipeline, LIMITS, 100_000, spent or (lambda name, tokens: None)
    )
    message = leased_from(
        {
            "listener": "model",
            "message_id": "now",
            "request_id": "r",
            "sender": "ann",
            "kind": "question",
            "content_type": "application/xml",
            "body": f'<question xmlns="{SPACE}">?</question>',
            "thread": "t",
        }
    )
    return asyncio.run(dispatcher.deliver(message, table)).done


@pytest.mark.requirement("XB-02")
@pytest.mark.parametrize("capability", ["", "shop.fetch"])
@pytest.mark.parametrize(
    ("handler", "options", "description"),
    [
        ("fetch", None, "Something to fetch."),
        ("fetch", '{"description":"Fetches from the cellar."}', "Fetches from the cellar."),
        ("fetch_bare", None, None),
    ],
    ids=["docstring", "file", "neither"],
)
def test_a_tool_is_described_by_the_file_else_by_the_docstring_else_by_its_capability(
    tmp_path: Path, capability: str, handler: str, options: str | None, description: str | None
) -> None:
    row = {
        "listener": "fetcher",
        "root_tag": "bare" if handler == "fetch_bare" else "order",
        "namespace": SPACE,
        "handler": f"{__name__}:{handler}",
        "capability": capability,
        "options": options,
    }
    infos = [listener_from(row), listener_from(LISTENERS[-1])]
    table = TableMaker(tmp_path, LIMITS).make(1, infos)
    (tool,) = table.tools_of(infos[1])
    assert tool["description"] == (capability if description is None else description)


@pytest.mark.requirement("XP-09")
@pytest.mark.requirement("XP-15")
def test_a_model_is_told_of_the_listeners_that_it_was_given_and_of_no_others(tmp_path: Path):
    deliver(Completion(), tmp_path)
    assert [tool["name"] for tool in CLIENT.tools] == ["fetcher", "person"]
    assert CLIENT.tools[0]["input_schema"]["properties"]["count"]["type"] == "integer"
    assert list(CLIENT.tools[1]["input_schema"]["properties"]) == ["xml"]


@pytest.mark.requirement("XP-15")
def test_calls_become_payloads_to_those_whom_they_name(tmp_path: Path):
    calls = [
        ToolCall("fetcher", {"urgent": True, "what": "tea & <milk>", "labels": ["a", "b"], "count": 2}),
        ToolCall("person", {"xml": '<note xmlns="urn:example:note">hello</note>'}),
        ToolCall("nobody at all", {"a": 1}),
        ToolCall("fetcher", {"no tag": 1}),
    ]
    done = deliver(Completion(calls=calls), tmp_path)
    order, note, stranger, wrong = done.answers
    assert (order.to, order.kind, order.namespace) == ("fetcher", "order", SPACE)
    value = Pipeline(payload_type_of(Order)).run_payload(order.body.encode())
    assert value == Order("tea & <milk>", 2, ["a", "b"], True)
    assert (note.to, note.kind) == ("person", "note")
    assert (stranger.to, stranger.kind) == ("nobody_at_all", "text")
    assert (wrong.to, wrong.kind) == ("fetcher", "text")


def test_arguments_that_do_not_fit_are_for_the_listener_to_refuse():
    kind = payload_type_of(Order)
    body = arguments_as_xml(kind, {"what": "tea", "cuont": 2})
    assert body is not None
    with pytest.raises(Faulty):
        Pipeline(kind).run_payload(body)


@pytest.mark.requirement("XP-15")
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("the answer is 42", ["text"]),
        (f'<report xmlns="{NAMESPACE}">42</report>', ["report"]),
        ('<a xmlns="urn:example:a"/><b xmlns="urn:example:a"/>', ["a", "b"]),
        ("<3 you", ["text"]),
        ("", []),
    ],
)
def test_what_a_model_says_is_its_payloads_or_a_text(text: str, kinds: list[str], tmp_path: Path):
    done = deliver(Completion(text=text), tmp_path)
    assert (done.outcome, [answer.kind for answer in done.answers]) == ("handled", kinds)
    assert all(answer.to is None for answer in done.answers)


@pytest.mark.requirement("XP-15")
def test_a_model_sees_the_conversation_up_to_the_message_that_came_and_whom_it_waits_for(tmp_path: Path):
    history = [
        said("1", "ann", "question"),
        said("2", "model", "call", to="fetcher", about="1"),
        said("3", "model", "call", to="person", about="1"),
        said("now", "person", "done", about="3"),
        said("5", "fetcher", "done", about="2"),
    ]
    deliver(Completion(), tmp_path, history)
    ((*told, remark),) = CLIENT.told
    assert [(one.role, one.name, one.call) for one in told] == [
        ("user", "ann", None),
        ("assistant", "fetcher", "2"),
        ("assistant", "person", "3"),
        ("tool", "person", "3"),
    ]
    assert (remark.role, "No answer yet from: fetcher." in remark.content) == ("system", True)
    assert [one.role for one in conversation(history, {"fetcher", "person"})] == [
        "user",
        "assistant",
        "assistant",
        "tool",
        "tool",
    ]


def test_a_message_that_the_history_has_not_yet_is_the_last_that_was_said(tmp_path: Path):
    deliver(Completion(), tmp_path, [said("1", "ann", "before")])
    assert [one.content for one in CLIENT.told[0]] == ["before", f'<question xmlns="{SPACE}">?</question>']


def test_a_client_that_gives_back_something_else_is_a_huh(tmp_path: Path):
    done = deliver("just text", tmp_path)  # type: ignore[arg-type]
    assert done.outcome == "huh"
    assert "no Completion" in done.answers[0].body


@pytest.mark.requirement("XP-08")
def test_tokens_are_counted_for_the_listener_that_spent_them(tmp_path: Path):
    spent: list[tuple[str, int]] = []
    deliver(Completion(tokens=7), tmp_path, spent=lambda name, tokens: spent.append((name, tokens)))
    assert spent == [("model", 7)]


def test_a_client_is_an_object_or_a_class_with_complete():
    assert client_of(CLIENT, "x") is CLIENT
    assert isinstance(client_of(Scripted, "x"), Scripted)
    for wrong in (object(), dict, lambda: None):
        with pytest.raises(HandlerError, match="give it async def complete"):
            client_of(wrong, "x")


@pytest.mark.requirement("XP-08")
def test_no_more_begins_than_the_tokens_of_a_minute_allow():
    now = [0.0]
    rate = TokenRate(100, clock=lambda: now[0])
    # The cost of a message is not known yet.
    assert (rate.places(0, 8), rate.places(1, 8)) == (1, 0)
    rate.spend(20)
    assert (rate.places(0, 8), rate.places(3, 8), rate.places(0, 2)) == (4, 1, 2)
    rate.spend(70)
    assert (rate.places(0, 8), rate.places(1, 8)) == (1, 0)
    rate.spend(10)
    assert rate.places(0, 8) == 0
    now[0] = 60.1
    assert rate.places(0, 8) > 0
