"""The options of `trunkline agents join --credentials`, its help, and the state of an unfinished one."""

from __future__ import annotations

import argparse
import json
import os
import uuid
from pathlib import Path
from typing import Any, Final

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.arguments import broker_address
from connectors.cli.shared.call import Call
from trunkline_agent.errors import UsageError

MCP, HUB, MQTT = DOORS = ("mcp", "hub", "mqtt")
"""The doors of a credentials file, in the order in which they are opened."""
ROLES: Final = ("worker", "delegator")


def _doors(text: str) -> tuple[str, ...]:
    wanted = {name.strip() for name in text.split(",")}
    if not wanted <= set(DOORS):
        raise argparse.ArgumentTypeError(f"expected some of hub,mqtt,mcp, found {text!r}")
    return tuple(door for door in DOORS if door in wanted)


CREDENTIALS_OPTIONS: Final = (
    argument("--doors", "some of hub,mqtt,mcp (default: those of the stack)", type=_doors, metavar="LIST"),
    argument("--role", "of its token: worker (default) or delegator, which registers jobs", choices=ROLES),
    flag("--replace", "FILE may exist; what it has of this agent is kept"),
    argument("--hub-url", "the hub's address for the agent (default: that of the settings)", metavar="URL"),
    argument("--broker", "the MQTT broker's address for the agent", type=broker_address, metavar="HOST[:PORT]"),
    argument("--mcp-url", "the agent MCP server's address for the agent", metavar="URL"),
)
JOIN_HELP: Final = """\
examples:
  trunkline agents join builder --credentials builder.json
  trunkline agents join builder --credentials builder.json --hub-url http://hub.example:3200 --doors hub
  trunkline agents join builder --new-key builder.pem

With --credentials: the file has a token for the hub, the secret for MQTT, the private key for MCP, and the
addresses. The library 'trunkline-agent' and its command read it. A command that broke off goes on when it is
given again: until then its state is in a hidden file beside FILE. The options behind --request-id belong to it.
"""
_NAMES: Final = ("doors", "role", "replace", "hub_url", "broker", "mcp_url")


def check_no_credentials_options(call: Call) -> None:
    """Raise UsageError if a command without `--credentials` has an option that belongs to it."""
    if given := [f"--{name.replace('_', '-')}" for name in _NAMES if getattr(call, name)]:
        raise UsageError(f"{', '.join(given)}: only with --credentials")


_LIMIT_BYTES: Final = 1_000_000


class JoinDraft:
    """The draft of an unfinished join of one agent. Each change is on the disk when its method returns.

    Raises UsageError if the draft of another agent is there, or if the file cannot be read or written.

    Args:
        target: The credentials file that the join makes.
        name: The agent.
        run: The idempotency key of the whole join, None for a new one. A draft that is there keeps its own.

    Attributes:
        is_resumed: Whether an earlier command has left the draft.
        found: The answers of the doors, by door.
    """

    def __init__(self, target: Path, name: str, run: str | None) -> None:
        self.path = target.with_name(f".{target.name}.joining")
        kept = self._read()
        self.is_resumed = kept is not None
        state: dict[str, Any] = {"name": name, "run": run or str(uuid.uuid4()), "found": {}}
        state.update(kept or {})
        if state.get("name") != name:
            raise UsageError(
                f"{self.path} is of an unfinished join of {state.get('name')!r}: finish that one, or remove "
                "the file"
            )
        self._run = str(state["run"])
        self._name = name
        self.private_key: str | None = state.get("private_key")
        self.found: dict[str, dict[str, Any]] = state["found"]

    def request_id(self, door: str) -> str:
        """Return the idempotency key of the request for a door: the same one in each command that goes on."""
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"trunkline:agents/join/{self._run}/{door}"))

    def put(self, door: str, answer: dict[str, Any]) -> None:
        """Store the answer of a door."""
        self.found[door] = answer
        self.save()

    def save(self) -> None:
        """Write the draft to its file, with mode 0600, in one step."""
        state = {"name": self._name, "run": self._run, "private_key": self.private_key, "found": self.found}
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise UsageError(f"--credentials: cannot write {self.path}: {error.strerror}") from None

    def delete(self) -> None:
        """Delete the draft's file, because the credentials file has everything or nothing was obtained."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        try:
            with self.path.open("rb") as file:
                state = json.loads(file.read(_LIMIT_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"--credentials: cannot read {self.path}: {type(error).__name__}") from None
        if not isinstance(state, dict) or not isinstance(state.get("found"), dict) or "run" not in state:
            raise UsageError(f"--credentials: {self.path} is no unfinished join; remove it")
        return state
