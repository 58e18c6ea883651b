"""Faults that clients make: taken client ids, slow readers of streams, largest bodies, outputs that fail.

Each runs on a thread of its own and is given the time that it lasts. It raises GaveUp if it could not be made,
and AssertionError if the backbone did what it may not do. Whether anything was lost is judged with the rest.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from connectors.doors.mqtt_bridge.bridge_standby import has_session, session_ids
from schemas.settings.settings import PROJECT_ROOT, MqttSettings, Settings
from tests.broker_processes import program_environment
from tests.failing_outputs import ASCII_LOCALE, TIMEOUT_S, run_with_failing_output
from tests.faults.prove.delivery_doors import HubMailbox
from tests.faults.prove.hub_client import Clock, GaveUp, HubClient
from tests.faults.prove.load_messages import DORA, FOLA, MESSAGES, READERS, UTE, mailbox
from tests.faults.prove.oracle import HANDED, Note, Oracle
from tests.faults.prove.schedule import BAD_OUTPUT, LARGEST, SLOW_READ, TAKE_ID
from tests.slow_readers import slow_readers
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_connection import MqttConnection

ClientFault = Callable[[float], None]

_TAKES_PAUSE_S: Final = 0.5
_HOLDS_S: Final = 0.5
_SESSION_S: Final = 60
# At each gateway.
_STREAMS: Final = 8
# A mailbox must fit into one answer of the gateway, also with those of the other fault.
_LARGE: Final = 3
_READ_BYTES: Final = 64
_READ_PAUSE_S: Final = 0.1
# The most that the other fields of a message take beside its text.
_FIELDS_BYTES: Final = 1024
_PAUSE_S: Final = 0.5
_TEXT: Final = "grün ✓ \U0001f600"
_WAITS, _TAKEN = "unread", "claimed"
# Fewer than the attempts after which a message is dead.
_OUTPUTS: Final = ("full", "closed")
_DRAIN: Final = [sys.executable, "-P", "-m", "connectors.cli", "messages", "drain"]


@dataclass(frozen=True)
class ClientFaults:
    """The faults of one seed.

    `agents_ids` are client ids of agents over MQTT, and `tokens` those of FOLA, whose messages stay, and UTE.
    `sender` makes a mailbox for one thread, which sends, and `operator` may see each mailbox.
    """

    settings: Settings
    urls: Sequence[str]
    agents_ids: Sequence[str]
    tokens: Mapping[str, str]
    sender: Callable[[], HubMailbox]
    operator: HubClient
    oracle: Oracle
    clock: Clock

    def by_name(self) -> dict[str, ClientFault]:
        """Return each fault by its name in the schedule."""
        return {
            f"{TAKE_ID}:agent": lambda for_s: self._take(self.agents_ids, for_s),
            f"{TAKE_ID}:bridge": self._take_bridges,
            f"{SLOW_READ}:events": self._read_slowly,
            f"{LARGEST}:messages": lambda for_s: self._send_largest((*READERS, DORA, FOLA)),
            f"{BAD_OUTPUT}:drain": lambda for_s: self._drain(),
        }

    def _take_bridges(self, for_s: float) -> None:
        """Take the name that others know, which must not be the id of a session, and the real id as well."""
        name = self.settings.mqtt.bridge_client_id
        while (is_taken := has_own_session(self.settings.mqtt, name)) is None:
            self._pause(_TAKES_PAUSE_S, "the broker let nobody in")
        if is_taken:
            raise AssertionError(f"the broker has a session of {name!r}, an id that others can guess")
        self._take([name, session_ids(self.settings)[0]], for_s)

    def _take(self, client_ids: Sequence[str], for_s: float) -> None:
        """Connect under these ids, again and again, until the broker has let each in.

        The first connection gets what the session has and confirms nothing, the second one ends the session.
        """
        until, left = time.monotonic() + for_s, set(client_ids)
        while left or time.monotonic() < until:
            for client_id, expiry_s in itertools.product(client_ids, (_SESSION_S, None)):
                connection = MqttConnection(
                    self.settings.mqtt, client_id=client_id, session_expiry_s=expiry_s, manual_ack=True
                )
                with suppress(BackboneUnreachable):
                    connection.open()
                    left.discard(client_id)
                    connection.lost.wait(_HOLDS_S if expiry_s else 0)
                connection.drop()
            self._pause(_TAKES_PAUSE_S, "the broker let nobody in")

    def _read_slowly(self, for_s: float) -> None:
        """Read a few bytes now and then of many streams of a mailbox with large messages."""
        self._send_largest([FOLA] * _LARGE)
        while not self._has_read(for_s):
            self._pause(_PAUSE_S, "no stream of events")

    def _has_read(self, for_s: float) -> bool:
        """Open the streams and read. Return whether anything came."""
        until, count = time.monotonic() + for_s, 0
        with suppress(OSError), ExitStack() as opened:
            streams: list[socket.socket] = []
            for url in self.urls:
                path, tokens = f"{MESSAGES}/events", [self.tokens[FOLA]]
                streams += opened.enter_context(slow_readers(url, path, tokens, _STREAMS))
            for stream in streams:
                stream.setblocking(False)
            while time.monotonic() < until:
                for stream in streams:
                    with suppress(OSError):
                        count += len(stream.recv(_READ_BYTES))
                time.sleep(_READ_PAUSE_S)
        return count > 0

    def _send_largest(self, names: Sequence[str]) -> None:
        own, size = self.sender(), self.settings.limits.payload_bytes - _FIELDS_BYTES
        for name in names:
            key = uuid.uuid4().hex
            own.send(name, f"{own.name} sends {key} ".ljust(size, "x"), key, None, self.oracle)

    def _drain(self) -> None:
        """Drain by the command to outputs that fail, and then to one that knows ASCII alone."""
        key = uuid.uuid4().hex
        text = f"{_TEXT} {key}"
        message_id = self.sender().send(UTE, text, key, None, self.oracle)
        for output in _OUTPUTS:
            self._fail(output, message_id)
        while self._status(message_id) == _WAITS:
            self._print(message_id, text)
            self._pause(_PAUSE_S, "the drain got no message")

    def _fail(self, output: str, message_id: str) -> None:
        """Drain to an output that fails, until a drain has failed at that and not at the backbone."""
        has_tried = False
        while not has_tried and self._status(message_id) == _WAITS:
            self._pause(_PAUSE_S, "no drain came as far as its output")
            code, complaint = run_with_failing_output(output, _DRAIN, self._environment())
            # A reader that left is no error, and a drain that reached nobody is one.
            has_tried = code == 0 if output == "closed" else "No space left" in complaint
            if "Traceback" in complaint:
                raise AssertionError(f"a drain with the output {output}: {complaint[-400:]}")

    def _print(self, message_id: str, text: str) -> None:
        """Drain to an output that works. A message was handed out if it was printed and acknowledged."""
        environment = self._environment() | ASCII_LOCALE
        done = subprocess.run(
            [*_DRAIN, "--json"], capture_output=True, env=environment, timeout=TIMEOUT_S, check=False
        )
        printed = json.loads(done.stdout)["messages"] if done.stdout else []
        for one in printed:
            if one["id"] == message_id and one["payload"]["text"] != text:
                raise AssertionError(f"a drain printed {one['payload']} instead of {text!r}")
            # An acknowledgement without an answer may count, or the message is leased and comes again.
            if self._status(one["id"]) == _TAKEN:
                self.oracle.note(Note(HANDED, "http", mailbox(UTE), one["id"], request="drain"))

    def _status(self, message_id: str) -> str:
        path = f"/api/hub/mailboxes/default/{UTE}"
        messages = self.operator.ask_known("GET", path, params={"limit": 100}).json()["messages"]
        return next((str(one["status"]) for one in messages if one["message_id"] == message_id), _WAITS)

    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join((str(PROJECT_ROOT), str(PROJECT_ROOT / "connectors" / "agent_sdk")))
        return program_environment(self.settings) | {"PYTHONPATH": paths, "TRUNKLINE_TOKEN": self.tokens[UTE]}

    def _pause(self, seconds: float, why: str) -> None:
        if not self.clock.has_patience():
            raise GaveUp(why)
        time.sleep(seconds)


def has_own_session(mqtt: MqttSettings, client_id: str) -> bool | None:
    """Return whether the broker has a session under this client id; None while it is away."""
    try:
        return has_session(mqtt, client_id)
    except BackboneUnreachable:
        return None
