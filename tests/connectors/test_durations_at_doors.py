"""The durations of a message have one range, one rule and one spelling at all doors."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from connectors.cli.messages.message_arguments import SENT
from connectors.doors.http_api.pump.xml_routes import XmlSending
from connectors.doors.mcp_tools.agents.tool_arguments import BroadcastMessage, PublishMessage, SendToAgent
from connectors.doors.mcp_tools.management.management_tools import SendMessage
from connectors.operations.rules.agent_models import BroadcastRequest
from connectors.operations.rules.message_models import MessageEnvelope, PublishRequest
from schemas.streams.agents.mqtt_agents import AgentSaid
from trunkline_agent.command import message_commands
from trunkline_agent.queue import Queue, command_line
from trunkline_agent.wire.agent_message import message_fault
from trunkline_agent.wire.message_fields import duration_s

pytestmark = pytest.mark.requirement("DL-41")

LEAST_S, MOST_S = 0.001, 366 * 86_400
# Whether a message with these times, until it is delivered and until it expires, is taken.
TIMES: tuple[tuple[Any, Any, bool], ...] = (
    (None, None, True),
    (None, LEAST_S, True),
    (LEAST_S, None, True),
    (None, MOST_S, True),
    (MOST_S, None, True),
    (1.5, 2, True),
    (None, 0, False),
    (0, None, False),
    (None, -1, False),
    (None, LEAST_S / 2, False),
    (None, MOST_S + 1, False),
    (MOST_S + 0.5, None, False),
    (None, float("inf"), False),
    (float("nan"), None, False),
    (2, 2, False),
    (3, 2, False),
)
WRONG = (
    "",
    "s",
    ".",
    "1e3",
    "-1",
    "+1",
    "nan",
    "inf",
    "1 m",
    "1w",
    "1mm",
    "٣",
    "1.2.3",
    "9" * 5000,
    "99999999d",
)
SAID: dict[str, Any] = {"message_id": "m1", "to": "bo", "kind": "note", "body": {}, "seq": 1}
NAMES = ("deliver_after_s", "expires_in_s")
ENVELOPE = {"type": "note", "payload": {}}
TO_AGENT = {"targetAgentId": "bo", "message": "hello"}
Taken = Callable[[dict[str, Any]], bool]


def by_model(
    model: type[BaseModel],
    given: dict[str, Any],
    deliver_after: str = "deliver_after_s",
    expires_in: str = "expires_in_s",
) -> Taken:
    """Return a function that tells if a model takes the times, under these names if there are any."""

    def taken(times: dict[str, Any]) -> bool:
        names = {"deliver_after_s": deliver_after, "expires_in_s": expires_in}
        try:
            model.model_validate(given | {names[name]: value for name, value in times.items()})
        except ValidationError:
            return False
        return True

    return taken


def by_queue(tmp_path: Any) -> Taken:
    """Return a function that tells if the file queue takes the times."""

    def taken(times: dict[str, Any]) -> bool:
        try:
            Queue(tmp_path, fsync=False).send("ask", "x", None, times.pop("expires_in_s", None), **times)
        except ValueError:
            return False
        return True

    return taken


@pytest.fixture(
    params=[
        ("HTTP", by_model(MessageEnvelope, ENVELOPE)),
        ("HTTP, broadcast", by_model(BroadcastRequest, ENVELOPE)),
        ("HTTP, topic", by_model(PublishRequest, ENVELOPE)),
        ("XML", by_model(XmlSending, {})),
        ("MQTT, the hub", by_model(AgentSaid, SAID)),
        ("MQTT, the agent", lambda times: message_fault(SAID | times) is None),
        *(
            (f"MCP, {tool.__name__}, {'/'.join(names)}", by_model(tool, given, *names))
            for names in (("deliverAfterSeconds", "expiresInSeconds"), ("delaySeconds", "ttlSeconds"))
            for tool, given in (
                (SendToAgent, TO_AGENT),
                (BroadcastMessage, {"message": "hello"}),
                (PublishMessage, {"topic": "news", "message": "hello"}),
                (SendMessage, TO_AGENT),
            )
        ),
        ("file queue", by_queue),
    ],
    ids=lambda door: door[0],
)
def door(request: pytest.FixtureRequest, tmp_path: Any) -> Taken:
    """A function that tells if a door takes a message with these times."""
    name, taken = request.param
    found: Taken = taken(tmp_path) if name == "file queue" else taken
    return found


def test_each_door_takes_the_same_durations(door: Taken) -> None:
    for deliver_after, expires_in, is_taken in TIMES:
        given = zip(NAMES, (deliver_after, expires_in), strict=True)
        times = {name: value for name, value in given if value is not None}
        assert door(dict(times)) is is_taken, times


def trunkline_parser() -> ArgumentParser:
    """The options of `trunkline messages send` about when and how urgently."""
    found = ArgumentParser()
    for option in SENT:
        option(found)
    return found


def agent_parser() -> ArgumentParser:
    """The parser of `trunkline-agent send`."""
    found = ArgumentParser()
    message_commands.add_to(found.add_subparsers())
    return found


@pytest.mark.parametrize(
    ("parser", "given", "older"),
    [
        (trunkline_parser, [], [("--after", "--expires")]),
        (agent_parser, ["send", "bo", "note"], []),
        (
            command_line.parser,
            ["send", "--topic", "ask"],
            [("--deliver-after-s", "--ttl-s"), ("--deliver-after", "--ttl")],
        ),
    ],
    ids=["trunkline", "trunkline-agent", "trunkline queue"],
)
def test_each_command_line_spells_durations_in_the_same_way(
    parser: Callable[[], ArgumentParser], given: list[str], older: list[tuple[str, str]]
) -> None:
    for deliver_after, expires_in in (("--deliver-after", "--expires-in"), *older):
        found = vars(parser().parse_args([*given, deliver_after, "1.5m", expires_in, "2h"]))
        times = [value for name, value in found.items() if name.startswith(("deliver", "expires", "ttl"))]
        assert sorted(times) == [90, 7200]


def test_a_duration_is_a_number_with_a_unit_or_seconds() -> None:
    seconds = {"90": 90, "0.5": 0.5, "90s": 90, "1.5m": 90, "2h": 7200, "1d": 86_400, "0": 0}
    assert {text: duration_s(text) for text in seconds} == seconds
    for text in WRONG:
        with pytest.raises(ArgumentTypeError, match="expected a time"):
            duration_s(text)
