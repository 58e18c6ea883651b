"""Gateways that take commands, and how tests sign commands for them: one such stack for a test file.

A file of another folder that imports `running_commands` has the fixture `stack`, too.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from connectors.doors.out_of_band.client import post_command
from connectors.doors.out_of_band.signed_commands import (
    Action,
    AddListener,
    command_bytes,
    key_id,
    load_private_key,
    private_key_file,
    sign,
)
from connectors.log.kafka_topic import ensure_topic
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import GatewaySettings, Settings, XmlPumpSettings
from tests.broker_processes import BrokerProcess, kafka_at, wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess
from tests.connectors.doors.http_api.hub_stack import Logged, read_log

ANSWER_S = 60.0
_numbers = itertools.count(1)


class CommandStack:
    """Gateways over one data directory and one topic."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.gateways: list[GatewayProcess] = []

    def start(self) -> GatewayProcess:
        """One more gateway that serves; the first takes the commands."""
        gateway = GatewayProcess(self.settings, self.folder)
        self.gateways.append(gateway)
        gateway.wait_ready()
        return gateway

    @property
    def operator_key(self) -> Ed25519PrivateKey:
        """The operator's own key."""
        return load_private_key(private_key_file(self.settings))

    def command(
        self,
        action: Action,
        *,
        nonce: str | None = None,
        late_s: float = 0.0,
        key: Ed25519PrivateKey | None = None,
        said_key: str | None = None,
    ) -> tuple[bytes, str]:
        """A command and its signature: by the operator's key and as of now, unless told otherwise."""
        signer = key or self.operator_key
        body = command_bytes(
            action,
            nonce=nonce or uuid.uuid4().hex,
            issued=datetime.now(UTC) - timedelta(seconds=late_s),
            key_id=said_key or key_id(signer.public_key()),
        )
        return body, sign(signer, body)

    def post(self, body: bytes, signature: str | None) -> tuple[int, dict[str, Any]]:
        """Give it as it is; status and answer."""
        return post_command(self.settings.command_socket, body, signature, ANSWER_S)

    def give(self, action: Action, **how: Any) -> tuple[int, dict[str, Any]]:
        """Sign and give a command."""
        return self.post(*self.command(action, **how))

    def added(self, **fields: Any) -> str:
        """A human listener of a new name, added."""
        name = f"person-{next(_numbers)}"
        status, answer = self.give(AddListener({"name": name, "type": "human", **fields}))
        assert status == 200, answer
        return name

    def operator(self, number: int = -1) -> httpx.Client:
        """A client with the operator's token."""
        return self.gateways[number].client()

    def listeners(self, number: int = -1) -> dict[str, dict[str, Any]]:
        """The listeners there are, by name."""
        with self.operator(number) as client:
            found = client.get("/api/hub/listeners").json()["listeners"]
        return {row["listener"]: row for row in found}

    def version(self) -> int:
        """The organism's version."""
        with self.operator() as client:
            return int(client.get("/api/hub/listeners").json()["version"])

    def refusals(self) -> list[dict[str, Any]]:
        """Return the records of refused commands, in order."""
        return [one.body for one in read_log(self.settings) if one.stream == "refused/commands"]

    def organism_log(self) -> list[Logged]:
        """The records about the organism, in order."""
        return [one for one in read_log(self.settings) if one.stream == "control/organism"]

    def wait_refused(self, why: str) -> dict[str, Any]:
        """The newest refusal whose reason holds this text; it is appended a moment after the answer."""
        return dict(
            wait_until(lambda: [one for one in self.refusals() if why in one["why"]], what=f"a refusal: {why}")[
                -1
            ]
        )

    def close(self) -> None:
        """End the gateways."""
        for gateway in self.gateways:
            gateway.program.kill()


def command_settings(broker: BrokerProcess, folder: Path) -> Settings:
    """Settings with topic, data directory and organism file of their own."""
    own = f"commands.{folder.name}.{next(_numbers)}"
    settings = Settings(
        data_dir=folder / "data",
        kafka=kafka_at(broker.port, topic=own, delivery_timeout_s=10),
        gateway=GatewaySettings(reactor_group=own),
        xml_pump=XmlPumpSettings(organism_file=folder / "organism.yaml", processes=0),
    )
    ensure_keyring(settings)
    ensure_topic(settings)
    return settings


@pytest.fixture(scope="module", name="stack")
def running_commands(
    kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CommandStack]:
    """One gateway that takes commands."""
    folder = tmp_path_factory.mktemp("commands")
    stack = CommandStack(command_settings(kafka_broker, folder), folder)
    try:
        stack.start()
        yield stack
    finally:
        stack.close()
