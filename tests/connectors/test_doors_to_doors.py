"""CM-07: whoever knows one door alone writes to whoever knows another: hub, file queue, MCP, MQTT and XML pump,
each to each, itself included. By the design's table of doors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
import yaml
from pydantic.alias_generators import to_camel

from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from tests.broker_processes import ProgramProcess, free_port, wait_until
from tests.connectors.doors.file_bridge.bridge_run import BridgeRun
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.connectors.doors.mcp_tools.conftest import Agent
from tests.connectors.noting_listener import FOLDER_VARIABLE, NOTE, NOTES, SPACE
from tests.mailbox_credentials import mailbox_credentials
from trunkline_agent import Agent as HubAgent
from trunkline_agent import Credentials
from trunkline_agent.credentials import HubAccess
from trunkline_agent.mcp import agent_client
from trunkline_agent.mqtt.inbox_receiver import InboxMessage
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.wire.message_fields import DESCRIPTION, MessageField
from trunkline_agent.xml import XmlSender

HUB, FILE, MCP, MQTT, XML = DOORS = ("hub", "file", "mcp", "mqtt", "xml")
# One sender and one reader at each door.
SENDER = {HUB: "hugo", FILE: "fil", MCP: "mia", MQTT: "mo", XML: "max"}
ANSWERS, RELAYS, PERSON = "wilma", "rita", "paula"
READER = {HUB: "hanna", FILE: "fred", MCP: "mara", MQTT: "mina", XML: "xena"}


class Got(NamedTuple):
    """A message as a reader's door shows it; `kind` is None where the door shows none.

    `about` has the fields of `DESCRIPTION`.
    """

    sender: str
    kind: str | None
    body: str
    about: tuple[str | None, ...] = (None,) * len(DESCRIPTION)


class Seen(NamedTuple):
    """A message as a reader's door shows it, the message that it answers, and its thread."""

    got: Got
    in_reply_to: str | None
    thread: str | None


class Doors:
    """A sender and a reader at each of five doors, who know nothing but their own."""

    def __init__(self, run: BridgeRun, folder: Path) -> None:
        self.run = run
        self.hub = {name: HubAgent(name, self._credentials(name)) for name in (SENDER[HUB], READER[HUB])}
        self.xml = XmlSender(self._credentials(SENDER[XML]))
        for name in (SENDER[FILE], READER[FILE]):
            run.principal(name).close()
        self.agents = {name: Agent(name, folder).joined(run.operator) for name in (SENDER[MCP], READER[MCP])}
        self.inbox: list[InboxMessage] = []
        self.mqtt = {name: self._mqtt(name, folder) for name in (SENDER[MQTT], READER[MQTT])}
        self.notes = folder / NOTES
        self.notes.touch()
        self._notes_read = 0

    def _credentials(self, name: str) -> Credentials:
        """Add a worker; its credentials at the hub."""
        return Credentials(
            name, HubAccess(self.run.settings.gateway_url, add_principal(self.run.operator, name, "worker"))
        )

    def _mqtt(self, name: str, folder: Path) -> MqttAgent:
        told = self.run.operator.post(f"/api/hub/agents/{name}/mqtt", json={}).json()
        credentials = mailbox_credentials(self.run.settings, name, told["secret"])
        # The tests' broker has no accounts.
        agent = MqttAgent(
            credentials, folder / f"mqtt-{name}", self.inbox.append, broker=self.run.settings.mqtt
        )
        return agent.__enter__()

    def close(self) -> None:
        """End what is open."""
        for agent in self.mqtt.values():
            agent.close()
        for hub_agent in self.hub.values():
            hub_agent.close()
        self.xml.close()

    def tool(self, agent: Agent, name: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool as this agent and return the answer."""

        async def call() -> dict[str, Any]:
            async with agent_client(self.run.settings.mcp_server_url, agent.name, agent.key_path) as client:
                found = await client.call_tool(name, arguments)
                assert not found.is_error, found.content
                return dict(found.structured_content or {})

        return anyio.run(call)

    def send(
        self,
        door: str,
        recipient: str,
        text: str,
        in_reply_to: str | None = None,
        thread: str | None = None,
        is_described: bool = False,
    ) -> str:
        """Send by a door, in the way of that door, with all of `DESCRIPTION` or nothing of it.

        Return the message's id.
        """
        sender = SENDER[door]
        described = {one.name: about_of(one, door) for one in DESCRIPTION if is_described}
        about = {"in_reply_to": in_reply_to, "thread": thread}
        if door == HUB:
            return str(
                self.hub[sender].send(recipient, "note", {"text": text}, **about, **described).message_id
            )
        if door == FILE:
            return self.run.queue.send(
                "status", text, recipient, sender=sender, reply_to=in_reply_to, thread=thread, **described
            )
        if door == MCP:
            named = {"targetAgentId": recipient, "message": text, "inReplyTo": in_reply_to, "thread": thread}
            given = {name: value for name, value in named.items() if value is not None}
            given |= {to_camel(name): value for name, value in described.items()}
            return str(self.tool(self.agents[sender], "send_to_agent", **given)["messageId"])
        if door == MQTT:
            return str(self.mqtt[sender].send(recipient, "hint", text, **about, **described).message_id)
        if door == XML:
            return self.xml.send(recipient, note(text)).messages[recipient]
        raise AssertionError(door)

    def read(self, door: str) -> list[Got]:
        """All that a door gives its reader now."""
        return [one.got for one in self.seen(door, READER[door])]

    def seen(self, door: str, reader: str) -> list[Seen]:
        """All that a door gives this reader now, with the answered message and the thread."""
        if door == HUB:
            taken_for_good = self.hub[reader].messages(limit=100, lease_s=None, wait_s=0)
            return [
                Seen(Got(m.sender, m.type, m.payload["text"], _about(vars(m))), m.in_reply_to, m.thread)
                for m in taken_for_good
            ]
        if door == FILE:
            return [_seen(m, m["from"], m["topic"], m["body"]) for m in self.run.queue.poll(reader)]
        if door == MCP:
            found = self.tool(self.agents[reader], "get_my_messages", unreadOnly=True)["messages"]
            if found:
                self.tool(self.agents[reader], "mark_read", messageIds=[message["id"] for message in found])
            return [
                Seen(
                    Got(m["from"], None, m["content"], tuple(m.get(to_camel(one.name)) for one in DESCRIPTION)),
                    m.get("inReplyTo"),
                    m.get("thread"),
                )
                for m in found
            ]
        if door == MQTT:
            count = len(self.inbox)
            taken, self.inbox[:count] = self.inbox[:count], []
            return [_seen(m.fields, m.sender, m.kind, m.body) for m in taken]
        # The listener may write meanwhile: what is behind the last whole line is for the next time.
        whole, _, _ = self.notes.read_text()[self._notes_read :].rpartition("\n")
        self._notes_read += len(whole) + 1 if whole else 0
        notes = [json.loads(line) for line in whole.splitlines()]
        return [Seen(Got(*found[:3]), *found[3:]) for found in notes]


def _seen(fields: Mapping[str, Any], sender: str, kind: str, body: str) -> Seen:
    return Seen(Got(sender, kind, body, _about(fields)), fields.get("in_reply_to"), fields.get("thread"))


def _about(fields: Mapping[str, Any]) -> tuple[str | None, ...]:
    return tuple(fields.get(one.name) for one in DESCRIPTION)


def about_of(field: MessageField, door: str) -> str:
    """Return what a sender says in a field of `DESCRIPTION`."""
    return f"the {field.name} of {SENDER[door]} ☃ \u202f\u0301"


def note(text: str) -> str:
    """A payload."""
    return f'<{NOTE} xmlns="{SPACE}"><said>{text}</said></{NOTE}>'


def text_of(sender_door: str, reader: str) -> str:
    """Return the text of a sender's message to a reader."""
    return f"{SENDER[sender_door]} to {reader} ☃"


def expected(sender_door: str, door: str) -> Got:
    """Return what the reader at `door` gets from the sender at `sender_door`, by the design's table."""
    text = text_of(sender_door, READER[door])
    kind = {HUB: "note", FILE: "status", MCP: "message", MQTT: "hint", XML: NOTE}[sender_door]
    # XML of the pump, text of the others.
    body = note(text) if sender_door == XML else text
    sender = SENDER[sender_door]
    # An envelope in XML has no place for a description.
    has_about = XML not in (sender_door, door)
    about = tuple(about_of(one, sender_door) if has_about else None for one in DESCRIPTION)
    if door == HUB:
        return Got(sender, kind, body, about)
    if door == FILE:
        return Got(sender, kind if kind == "status" else "ask", body, about)
    if door == MCP:
        return Got(sender, None, body, about)
    if door == MQTT:
        return Got(sender, kind, body, about)
    # A payload of the listener's own is one; all else is <text kind="…">.
    return Got(sender, kind, text if sender_door == XML else body, about)


ORGANISM = {
    "listeners": [
        {
            "name": READER[XML],
            "root_tag": NOTE,
            "namespace": SPACE,
            "handler": "tests.connectors.noting_listener:hear",
            "capability": "notes what it is told",
        },
        {
            "name": ANSWERS,
            "root_tag": "query",
            "namespace": SPACE,
            "handler": "tests.connectors.noting_listener:answer",
            "capability": "answers",
        },
        {
            "name": RELAYS,
            "root_tag": "relayed",
            "namespace": SPACE,
            "handler": "tests.connectors.noting_listener:relay",
            "capability": "asks before it answers",
            "tools": [ANSWERS],
        },
        {"name": PERSON, "type": "human", "capability": "a person"},
    ]
}


@pytest.fixture
def doors(
    backbone_settings: Settings,
    keyring: Keyring,
    tmp_path: Path,
    start_bridge: Callable[..., ProgramProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Doors]:
    """Gateway with the MCP door, the bridges of files and MQTT, and a pump."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    organism = tmp_path / "organism.yaml"
    organism.write_text(yaml.safe_dump(ORGANISM))
    door = backbone_settings.agent_mcp.model_copy(update={"port": free_port()})
    run = BridgeRun(backbone_settings.model_copy(update={"agent_mcp": door}), keyring, tmp_path)
    pump = ProgramProcess("connectors.doors.xml_pump", run.settings, tmp_path, "pump")
    try:
        start_bridge(run.settings)
        pump.wait_ready()
        found = Doors(run, tmp_path)
        yield found
        found.close()
    finally:
        pump.stop()
        run.close()


@pytest.mark.requirement("CM-07")
@pytest.mark.requirement("DL-42")
@pytest.mark.requirement("JE-26")
@pytest.mark.requirement("XP-15")
def test_each_of_five_doors_reaches_each_once_with_sender_kind_and_body(doors: Doors) -> None:
    # fred is known as one who reads by file.
    assert doors.read(FILE) == []
    for sender_door in DOORS:
        for door in DOORS:
            doors.send(sender_door, READER[door], text_of(sender_door, READER[door]), is_described=True)
    for door in DOORS:
        wanted = sorted((expected(sender_door, door) for sender_door in DOORS), key=str)
        got: list[Got] = []

        def has_come(door: str = door, got: list[Got] = got) -> bool:
            got += doors.read(door)
            return len(got) >= len(DOORS)

        wait_until(has_come, 30, f"what was sent to {READER[door]}")
        assert sorted(got, key=str) == wanted
        assert doors.read(door) == []
    # And no mailbox has more than that, or anything that nobody read.
    for door in DOORS:

        def is_done(door: str = door) -> bool:
            rows = doors.run.mailbox(READER[door]).values()
            return len(rows) >= len(DOORS) and {row["status"] for row in rows} <= {"claimed", "read"}

        # The claims of messages read in a file or over MQTT follow a moment later. The bridge also carries
        # messages between two users of files into the mailbox a moment later.
        wait_until(is_done, 30, f"{READER[door]} has read everything")
        assert len(doors.run.mailbox(READER[door])) == len(DOORS)


# Texts that a parser of JSON would take for something else, and one that is plain.
TEXTS = ("42", "true", '{"a": 1}', '"quoted"', "hi")


@pytest.mark.requirement("AG-96")
def test_a_text_is_the_same_text_at_all_doors_and_when_it_is_sent_back(doors: Doors) -> None:
    assert doors.read(FILE) == []
    operator = doors.run.operator
    readers = (HUB, FILE, MCP, MQTT, XML)
    for door in readers:
        name = READER[door]
        for text in TEXTS:
            for sender_door in (HUB, FILE, MCP, MQTT):
                doors.send(sender_door, name, text)
            # A JSON string, as other programs send it.
            operator.post("/api/hub/messages", json={"recipient": name, "type": "note", "payload": text})
    count = len(TEXTS) * 5
    for door in readers:
        got: list[str] = []

        def has_come(door: str = door, got: list[str] = got) -> bool:
            if door == HUB:
                taken = doors.hub[READER[HUB]].messages(limit=100, lease_s=None, wait_s=0)
                for one in taken:
                    payload = one.payload if isinstance(one.payload, dict) else {"text": one.payload}
                    got.append(payload["text"])
                    # As it was got.
                    doors.hub[READER[HUB]].send(READER[MCP], "back", one.payload)
            else:
                got += [one.body for one in doors.read(door)]
            return len(got) >= count * (2 if door == MCP else 1)

        wait_until(has_come, 60, f"the texts for {READER[door]}")
        assert sorted(got) == sorted(TEXTS * (10 if door == MCP else 5)), door
