"""`trunkline agents join NAME --credentials FILE`: one file with an agent's access to every door.

The order of the doors is fixed: the gateway admits no participant with the name of a principal, but adds a
principal with the name of a participant. All doors of one name share one mailbox.

This module has the options, their help, the state of an unfinished join, and the join itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.arguments import broker_address
from connectors.cli.shared.call import Call
from trunkline_agent.credentials import Credentials, HubAccess, McpAccess, MqttAccess
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.terminal_text import escaped

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

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


_AGAIN: Final = "the same command again goes on where this one broke off"
_BROKER_WAIT_S: Final = 2.0


def join_every_door(call: Call) -> int:
    """Open the doors for an agent, and write its credentials to the file that the command names.

    Returns the exit code 0. Raises UsageError for a file that exists without `--replace`, and the errors of
    `Call.post`. A note on stderr then says whether the same command goes on.
    """
    file: Path = call.credentials
    kept = _kept(file, call)
    wanted, left_out = _available(call, kept)
    if not wanted:
        raise UsageError("--doors: this stack has none of them: " + "; ".join(left_out.values()))
    draft = JoinDraft(file, call.name, call.request_id)
    if not draft.is_resumed:
        draft.save()
    for door in wanted:
        if door not in draft.found and (kept is None or getattr(kept, door) is None):
            _open(call, draft, door)
    credentials = _credentials(call, kept, draft)
    credentials.save(file)
    draft.delete()
    return _print(call, credentials, left_out)


def _kept(file: Path, call: Call) -> Credentials | None:
    """Return the credentials of this agent that the file has, None for a new file. Raises UsageError."""
    if not file.exists():
        return None
    if not call.replace:
        raise UsageError(
            f"--credentials: {file} exists already; it is not overwritten. --replace keeps the secrets of "
            f"{call.name} that it has, adds doors, and writes the present addresses"
        )
    try:
        found = Credentials.load(file)
    except UsageError:
        return None
    if found.name != call.name:
        raise UsageError(f"--credentials: {file} has the secrets of {found.name}; name another file")
    return found


def _available(call: Call, kept: Credentials | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the doors to open, and why each other one of the default is left out."""
    if call.doors is not None:
        return call.doors, {}
    left_out: dict[str, str] = {}
    settings = call.settings
    has_mcp = settings.agent_mcp.port or settings.agent_mcp.url or call.mcp_url
    if not has_mcp:
        left_out[MCP] = "the agent MCP door is off (agent_mcp.port is 0)"
    elif kept is not None and kept.mcp is None and kept.hub is not None:
        left_out[MCP] = "an agent's key has to be registered before its token"
    if call.broker is None and not _broker_answers(settings):
        left_out[MQTT] = f"no MQTT broker answers at {settings.mqtt.host}:{settings.mqtt.port}"
    return tuple(door for door in DOORS if door not in left_out), left_out


def _broker_answers(settings: Settings) -> bool:
    from connectors.programs.local_stack.ports import mqtt_answers
    from trunkline_agent.mqtt.mqtt_tls import mqtt_context

    mqtt = settings.mqtt
    return mqtt_answers(mqtt.host, mqtt.port, timeout_s=_BROKER_WAIT_S, context=mqtt_context(mqtt))


def _open(call: Call, draft: JoinDraft, door: str) -> None:
    """Open one door, and store its answer in the draft."""
    try:
        draft.put(door, _STEPS[door](call, draft))
    except (BackboneUnreachable, KeyboardInterrupt):
        print(f"{_AGAIN}. Its state is in {draft.path}".capitalize(), file=sys.stderr, flush=True)
        raise
    except TrunklineError as error:
        if not draft.found:
            draft.delete()
            raise
        others = ",".join(sorted(draft.found))
        raise type(error)(
            f"{error}; {call.name} has access by {others} already: {_AGAIN}, or --doors {others} writes that "
            "alone"
        ) from None


def _open_mcp(call: Call, draft: JoinDraft) -> dict[str, Any]:
    from trunkline_agent.mcp.signing import key_id, load_private_key, new_key_pair, public_pem

    if draft.private_key is None:
        draft.private_key = new_key_pair()[0].decode("ascii")
        draft.save()
    public_key = public_pem(load_private_key(draft.private_key.encode("ascii")))
    answer = {"key_id": key_id(public_key)}
    if draft.is_resumed:
        with suppress(NotFound):
            keys = call.get("participants", call.name)["keys"]
            if answer["key_id"] in {key["key_id"] for key in keys}:
                return answer
    body = {"public_key": public_key, "task": call.task, "capabilities": call.capability}
    try:
        call.post("participants", request_id=draft.request_id(MCP), agent_name=call.name, **body)
    except Refused as error:
        raise Refused(
            f"mcp: {error}. 'trunkline agents stop {call.name}' ends an agent that takes part; without this "
            "door: --doors hub,mqtt"
        ) from None
    return answer


def _open_hub(call: Call, draft: JoinDraft) -> dict[str, Any]:
    body = {"principal": call.name, "role": call.role or ROLES[0]}
    try:
        made = call.post("principals", request_id=draft.request_id(HUB), **body)
    except Refused as error:
        raise Refused(
            f"hub: {error}. A token is shown once, and the name of a revoked one is not given again: choose "
            "another name, or leave this door out with --doors"
        ) from None
    return {"token": made["token"], "role": made["role"]}


def _open_mqtt(call: Call, draft: JoinDraft) -> dict[str, Any]:
    try:
        made = call.post("agents", call.name, "mqtt", request_id=draft.request_id(MQTT))
    except Refused as error:
        raise Refused(
            f"mqtt: {error}. 'trunkline agents mqtt-remove {call.name}' revokes the secret that it has"
        ) from None
    return {"prefix": made["prefix"], "secret": made["secret"]}


_STEPS: Final[dict[str, Callable[[Call, JoinDraft], dict[str, Any]]]] = {
    MCP: _open_mcp,
    HUB: _open_hub,
    MQTT: _open_mqtt,
}


def _credentials(call: Call, kept: Credentials | None, draft: JoinDraft) -> Credentials:
    """Return the credentials with what was obtained now or before, at the present addresses."""
    settings, found = call.settings, draft.found
    token = found[HUB]["token"] if HUB in found else kept and kept.hub and kept.hub.token
    key = draft.private_key if MCP in found else kept and kept.mcp and kept.mcp.private_key
    mqtt = found.get(MQTT) or (kept and kept.mqtt and vars(kept.mqtt))
    broker = {"host": settings.mqtt.host, "port": settings.mqtt.port, **(call.broker or {})}
    uses_tls = settings.gateway.ca_certs or (settings.mqtt.ca_certs if mqtt else None)
    return Credentials(
        call.name,
        hub=None if not token else HubAccess(call.hub_url or settings.gateway_url, token),
        mqtt=None
        if not mqtt
        else MqttAccess(**broker, tls=settings.mqtt.tls, prefix=mqtt["prefix"], secret=mqtt["secret"]),
        mcp=None if not key else McpAccess(call.mcp_url or settings.mcp_server_url, key),
        ca_certs=None if uses_tls is None else str(uses_tls.absolute()),
    )


def _print(call: Call, credentials: Credentials, left_out: dict[str, str]) -> int:
    inside = [door for door in DOORS if getattr(credentials, door) is not None]
    left_out = {door: why for door, why in left_out.items() if door not in inside}
    answer = {
        "name": credentials.name,
        "credentials_file": str(call.credentials),
        "doors": inside,
        "left_out": left_out,
        "ca_certs": credentials.ca_certs,
    }
    lines = [
        f"agent        {escaped(credentials.name)}",
        f"credentials  {call.credentials}",
        f"doors        {', '.join(inside)}",
        *(f"without      {door}: {why}" for door, why in left_out.items()),
    ]
    if credentials.ca_certs is not None:
        lines.append(f"authority    {credentials.ca_certs}; it has to be on the agent's machine, too")
    if credentials.mqtt is not None and call.settings.mqtt.require_client_cert:
        lines.append("The broker also asks for a client's certificate, which this file does not have.")
    return call.print_answer(answer, *lines)
