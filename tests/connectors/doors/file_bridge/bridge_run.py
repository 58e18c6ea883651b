"""A bridge, a gateway and a queue over one log, and what tests ask of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from connectors.doors.file_bridge.queue_folder import queue_root
from connectors.doors.file_bridge.records import Progress
from schemas.keys.sealing import Keyring
from schemas.settings.settings import GatewaySettings, Settings
from tests.broker_processes import ProgramProcess, wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess, add_principal
from tests.faults.test_pickers import folded
from trunkline_agent.queue import Queue


class BridgeRun:
    """`close` ends what was started."""

    def __init__(self, settings: Settings, keyring: Keyring, folder: Path) -> None:
        own = GatewaySettings(reactor_group=f"reactor-{settings.kafka.topic}")
        settings = settings.model_copy(update={"gateway": own})
        self.gateway = GatewayProcess(settings, folder)
        self.settings = self.gateway.settings
        self.root = queue_root(self.settings)
        self.queue = Queue(self.root)
        self.keyring, self._folder = keyring, folder
        self.bridge = self.started()
        self.gateway.wait_ready()
        self.operator: httpx.Client = self.gateway.client()

    def started(self) -> ProgramProcess:
        """A bridge that has been started and may not be ready yet."""
        return ProgramProcess("connectors.doors.file_bridge", self.settings, self._folder, "bridge")

    def kill(self) -> None:
        """kill -9 of the bridge."""
        self.bridge.kill()

    def start(self) -> None:
        """Start it again, and wait until it has looked at everything once."""
        self.bridge = self.started()
        self.bridge.wait_ready()

    def wait_look(self) -> None:
        """Wait until the bridge has begun a look after this call, and ended it."""
        for _ in range(2):
            sent = self.queue.send("ask", "look", to="watcher", sender="watcher", session="watched")
            wait_until(lambda sent=sent: sent in self.mailbox("watcher", "watched"), 20, "the bridge looks")

    def says(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """The lines of the bridge's log about this event that hold these fields."""
        lines = (json.loads(line) for line in self.bridge.log().splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == event and fields.items() <= line.items()]

    def session(self, name: str = "default") -> Path:
        """The folder of a session."""
        return self.root / "sessions" / name

    def write(self, *lines: bytes, session: str = "default") -> None:
        """Append lines as somebody who does not use the library."""
        with (self.session(session) / "messages.jsonl").open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))

    def close(self) -> None:
        """End bridge and gateway."""
        self.operator.close()
        self.bridge.stop()
        self.gateway.program.stop()

    def principal(self, name: str) -> httpx.Client:
        """Add a worker; a client with its token."""
        return self.gateway.client(add_principal(self.operator, name, "worker"))

    def mailbox(self, name: str, session: str = "default") -> dict[str, dict[str, Any]]:
        """The messages of a mailbox by id."""
        answer = self.operator.get(f"/api/hub/mailboxes/{session}/{name}", params={"limit": 1000})
        assert answer.status_code == 200, answer.text
        return {message["message_id"]: message for message in answer.json()["messages"]}

    def wait_mailbox(self, name: str, ids: set[str], session: str = "default", status: str = "unread") -> None:
        """Wait until a mailbox holds exactly these messages, each with this status."""

        def found() -> bool:
            held = self.mailbox(name, session)
            return set(held) == ids and {message["status"] for message in held.values()} <= {status}

        wait_until(found, 30, f"{session}/{name} holds {len(ids)} messages, {status}")

    def verdicts(self) -> Counter[tuple[str, str, str]]:
        """How often each verdict was said in the log: stream, message's id, verdict; postings alone."""
        said: Counter[tuple[str, str, str]] = Counter()
        for record, verdict in folded(self.settings, self.keyring):
            headers = dict(zip(record.header_names, record.header_values, strict=True))
            if headers["ce_type"] == b"message.posted":
                said[record.key.decode(), headers["ce_id"].decode(), verdict] += 1
        return said

    def noted_served(self, session: str = "default") -> set[str]:
        """The consumers that the bridge has noted on disk."""
        progress = Progress.load(self.settings.data_path / "file_bridge" / "progress.json")
        return progress.served.get(session, set())

    def carried(self) -> int:
        """The sum of the bridge's cursors, in bytes."""
        cursors = self.root.glob("sessions/*/cursors/trunkline-bridge.cursor")
        return sum(int(cursor.read_text()) for cursor in cursors)

    def written(self) -> int:
        """The length of all sessions' files, in bytes."""
        return sum(path.stat().st_size for path in self.root.glob("sessions/*/messages.jsonl"))

    def refused(self) -> list[bytes]:
        """The bodies of what the file door could not make a message of."""
        records = (record for record, _ in folded(self.settings, self.keyring))
        return [record.value for record in records if record.key == b"refused/file"]


def lines_of(root: Path, session: str = "default") -> list[dict[str, Any]]:
    """The lines of a session's file."""
    text = (root / "sessions" / session / "messages.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
