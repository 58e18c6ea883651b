"""Messages by five doors: hub, file queue, agent MCP, MQTT and XML, to readers at each of them."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from connectors.doors.file_bridge.queue_folder import queue_root
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.connectors.doors.xml_pump.pump_stack import document, element
from tests.faults.prove.comparison import Reader
from tests.faults.prove.hub_client import Clock, GaveUp, HubClient, shown, text_of
from tests.faults.prove.mcp_client import McpClient
from tests.faults.prove.oracle import ASKED, FORGED, HANDED, Note, Oracle, content_hash
from tests.faults.prove.schedule import Schedule
from tests.faults.prove.seed_parts import LISTENER
from tests.mailbox_credentials import mailbox_credentials
from tests.programs import run_program
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub.plans import Answer
from trunkline_agent.mqtt.inbox_receiver import InboxMessage
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.queue import Queue
from trunkline_agent.wire.agent_message import mqtt_user
from trunkline_agent.wire.mqtt_password import mqtt_client_id

# The readers at the doors HTTP, file, MCP and MQTT.
HANNA, FRED, MARA, MINA = READERS = ("hanna", "fred", "mara", "mina")
# Consumers lease the messages of the first, and followers see those of the second; see `load_deliveries`.
DORA, FOLA = "dora", "fola"
# The reader of a mailbox by the command line.
UTE: Final = "ute"
_RECIPIENTS: Final = (*READERS, DORA, FOLA)
MESSAGES: Final = "/api/hub/messages"


def mailbox(name: str) -> str:
    """The stream of a mailbox."""
    return f"mailbox/default/{name}"


def readers_of() -> tuple[Reader, ...]:
    """Return the readers of a run. At HTTP and MCP they stop with the load, so messages may wait."""
    return (
        Reader(mailbox(HANNA)),
        Reader(mailbox(MARA)),
        Reader(mailbox(UTE)),
        Reader(mailbox(FRED), gets_all=True),
        Reader(mailbox(MINA), gets_all=True),
    )


class Words:
    """The texts of one sender: each text occurs once in a run, and the readers take turns."""

    def __init__(self, schedule: Schedule, sender: str) -> None:
        self.sender = sender
        self.duplicates = schedule.duplicates
        self.draw = random.Random(f"{sender}/{schedule.seed}")
        self._seed = schedule.seed
        self._numbers = itertools.count(1)

    def next(self) -> tuple[str, str]:
        """The next recipient and text."""
        number = next(self._numbers)
        return self.draw.choice(_RECIPIENTS), f"{self.sender} {self._seed}/{number} ☃"


class HubSender:
    """Sends by HTTP, some requests twice."""

    def __init__(self, client: HubClient, words: Words, oracle: Oracle, clock: Clock) -> None:
        self._client, self._words, self._oracle, self._clock = client, words, oracle, clock

    def run(self) -> None:
        """Send until the load ends."""
        while self._clock.may_begin():
            to, text = self._words.next()
            body = {"recipient": to, "type": "note", "payload": {"text": text}}
            answer = self._client.ask(
                "POST", MESSAGES, duplicates=self._words.duplicates, says=_message_id, json=body
            )
            if answer.status != 200:
                raise AssertionError(f"the hub took no message: {shown(answer)}")
            stored = json.dumps({"text": text}, ensure_ascii=False, separators=(",", ":"))
            found = content_hash(self._words.sender, to, stored)
            self._oracle.acked("http", mailbox(to), answer.json()["message_id"], self._words.sender, found)
            time.sleep(0.15)


class HubReader:
    """Drains a mailbox by HTTP, each drain under an id of its own until it is answered."""

    def __init__(self, client: HubClient, name: str, oracle: Oracle, clock: Clock) -> None:
        self._client, self._name, self._oracle, self._clock = client, name, oracle, clock

    def run(self) -> None:
        """Drain until the load ends."""
        while self._clock.may_begin():
            request = uuid.uuid4().hex
            answer = self._client.ask(
                "GET",
                MESSAGES,
                headers={"X-Request-ID": request},
                params={"limit": 5},
                duplicates=0.1,
                says=_message_ids,
            )
            if answer.status != 200:
                raise AssertionError(f"a drain was refused: {shown(answer)}")
            for message in answer.json()["messages"]:
                self._oracle.note(Note(HANDED, "http", mailbox(self._name), message["id"], request=request))
            time.sleep(0.2)


def _message_id(answer: Answer) -> object:
    return answer.json().get("message_id")


def _message_ids(answer: Answer) -> object:
    return [message["id"] for message in answer.json().get("messages", ())]


class FileSender:
    """Writes into the file queue; a line may stand there twice, as by somebody who sends again."""

    def __init__(self, settings: Settings, words: Words, oracle: Oracle, clock: Clock) -> None:
        self._root = queue_root(settings)
        self._queue = Queue(self._root)
        self._words, self._oracle, self._clock = words, oracle, clock
        self.duplicates = 0

    def run(self) -> None:
        """Send until the load ends."""
        while self._clock.may_begin():
            to, text = self._words.next()
            self._sent(self._queue.send("status", text, to=to, sender=self._words.sender), to, text)
            # A reader of files is handed every line of its file, so a repeated line for fred would come twice.
            if to != FRED and self._words.draw.random() < self._words.duplicates:
                self._again()
            time.sleep(0.25)

    def _sent(self, message_id: str, to: str, text: str) -> None:
        found = content_hash(self._words.sender, to, text)
        self._oracle.acked("file", mailbox(to), message_id, self._words.sender, found)

    def _again(self) -> None:
        """The last line once more."""
        path = self._root / "sessions" / "default" / "messages.jsonl"
        line = path.read_bytes().splitlines()[-1]
        if json.loads(line)["from"] == self._words.sender:
            with path.open("ab", buffering=0) as file:
                file.write(line + b"\n")
            self.duplicates += 1


def send_on_full_disk(settings: Settings, seed: int, oracle: Oracle) -> int:
    """Send by the command from a process whose files may not grow beyond what the queue's has: a disk that gets
    full. Returns how many were refused.
    """
    refused, root = 0, queue_root(settings)
    path = root / "sessions" / "default" / "messages.jsonl"
    for number in range(3):
        size = (path.stat().st_size if path.exists() else 0) + (60 if number < 2 else 100_000)
        text = f"fay {seed}/{number} {uuid.uuid4().hex} " + "x" * 200
        command = [sys.executable, "-P", "-m", "trunkline_agent.queue", "send", "--topic", "status"]
        done = run_program(
            ["prlimit", f"--fsize={size}", *command, "--to", HANNA, "--sender", "fay", "--body", text],
            timeout_s=30,
            env=_queue_environment(root),
        )
        found = content_hash("fay", HANNA, text)
        if done.returncode == 0:
            oracle.acked("file", mailbox(HANNA), done.stdout.split()[-1], "fay", found)
        else:
            refused += 1
            oracle.note(Note(FORGED, "file", mailbox(HANNA), "refused", hash=found))
    return refused


def _queue_environment(root: Path) -> dict[str, str]:
    return {**os.environ, "TRUNKLINE_QUEUE_ROOT": str(root), "PYTHONPATH": str(PROJECT_ROOT)}


class FileReader:
    """Polls the file queue."""

    def __init__(self, settings: Settings, oracle: Oracle, clock: Clock) -> None:
        self._queue = Queue(queue_root(settings))
        self._oracle, self._clock = oracle, clock

    def run(self) -> None:
        """Poll until the load ends."""
        while self._clock.may_begin():
            poll = uuid.uuid4().hex
            for message in self._queue.poll(FRED):
                self._oracle.note(Note(HANDED, "file", mailbox(FRED), message["msg_id"], request=poll))
            time.sleep(0.3)


class McpAgent:
    """Sends over MCP, with a clock that may be wrong, and sometimes reads and marks."""

    def __init__(self, client: McpClient, name: str, words: Words, oracle: Oracle, clock: Clock) -> None:
        self.client, self._name = client, name
        self._words, self._oracle, self._clock = words, oracle, clock

    def run(self) -> None:
        """Send, and sometimes read and mark."""
        while self._clock.may_begin():
            to, text = self._words.next()
            key = uuid.uuid4().hex
            told = self.client.call("send_to_agent", targetAgentId=to, message=text, idempotencyKey=key)
            found = content_hash(self._name, to, text)
            self._oracle.acked("mcp", mailbox(to), told["messageId"], self._name, found)
            if self._words.draw.random() < 0.3:
                self._read()
            time.sleep(0.4)

    def _read(self) -> None:
        messages = self.client.call("get_my_messages", unreadOnly=True)["messages"]
        if messages:
            self.client.call("mark_read", messageIds=[message["id"] for message in messages])
        read = uuid.uuid4().hex
        for message in messages:
            self._oracle.note(Note(HANDED, "mcp", mailbox(self._name), message["id"], request=read))


class MqttSender:
    """An agent over MQTT, which says what it says on its outbox; a second one reads."""

    def __init__(
        self, settings: Settings, name: str, operator: HubClient, words: Words, oracle: Oracle, clock: Clock
    ) -> None:
        told = operator.ask("POST", f"/api/hub/agents/{name}/mqtt", json={}).json()
        credentials = mailbox_credentials(settings, name, told["secret"])
        self.client_id = mqtt_client_id(told["secret"], mqtt_user(name))
        self._agent = MqttAgent(
            credentials, settings.data_path.parent / f"mqtt-{name}", self._got, broker=settings.mqtt
        )
        self._name, self._words, self._oracle, self._clock = name, words, oracle, clock

    def _got(self, message: InboxMessage) -> None:
        # It may come twice, and is then the same.
        self._oracle.note(Note(HANDED, "mqtt", mailbox(self._name), message.message_id, request="inbox"))

    def run(self) -> None:
        """Be there, and send if there is anything to say, until the load ends."""
        while True:
            try:
                agent = self._agent.__enter__()
                break
            except TrunklineError as error:
                self._wait(error)
        try:
            while self._clock.may_begin():
                if self._name == MINA:
                    time.sleep(0.2)
                    continue
                self._say(agent)
                time.sleep(0.4)
        finally:
            if self._name != MINA:
                agent.close()

    def close(self) -> None:
        """End the connection."""
        self._agent.close()

    def _say(self, agent: MqttAgent) -> None:
        to, text = self._words.next()
        message_id, entered = str(uuid.uuid4()), False
        while True:
            try:
                if entered:
                    agent.resend()
                else:
                    entered = True
                    agent.send(to, "hint", text, message_id=message_id)
                break
            except TrunklineError as error:
                self._wait(error)
        self._oracle.acked("mqtt", mailbox(to), message_id, self._name, content_hash(self._name, to, text))

    def _wait(self, error: TrunklineError) -> None:
        if not self._clock.has_patience():
            raise GaveUp(str(error)) from error
        time.sleep(0.1)


class XmlSender:
    """Posts XML to a listener, which answers each message once."""

    def __init__(self, client: HubClient, words: Words, oracle: Oracle, clock: Clock) -> None:
        self._client, self._words, self._oracle, self._clock = client, words, oracle, clock
        self._numbers: Iterator[int] = itertools.count(1)

    def run(self) -> None:
        """Post until the load ends."""
        sender = self._words.sender
        while self._clock.may_begin():
            payload = element("work", number=next(self._numbers))
            number = re.findall(r"<number>\d+</number>", payload)[0]
            answer = self._client.ask(
                "POST",
                "/messages",
                duplicates=self._words.duplicates,
                says=lambda answer: re.findall(r'<message id="([^"]+)"', text_of(answer)),
                content=document(payload, LISTENER),
                headers={"Content-Type": "application/xml"},
            )
            if answer.status != 202:
                raise AssertionError(f"XML was not taken: {shown(answer)}")
            (message_id,) = re.findall(r'<message id="([^"]+)"', text_of(answer))
            found = content_hash(sender, LISTENER, payload)
            self._oracle.acked("xml", mailbox(LISTENER), message_id, sender, found)
            told = {"recipient": mailbox(sender), "kind": "worked", "body": number}
            self._oracle.note(Note(ASKED, "xml", mailbox(LISTENER), message_id, **told))
            time.sleep(0.1)
