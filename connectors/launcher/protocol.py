"""What a launcher is (HH-05): three methods, what is launched, and the names in an agent's environment."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from connectors.gateway_client.gateway_tls import CA_VARIABLE
from connectors.terminal.json_log import BLANK
from schemas.errors import TrunklineError

# What an agent finds in its environment. The first two come with the spec, the others are made from it.
HUB_URL_VARIABLE: Final = "TRUNKLINE_HUB_URL"
AGENT_TOKEN_VARIABLE: Final = "TRUNKLINE_AGENT_TOKEN"  # noqa: S105  a variable's name
TASK_ID_VARIABLE: Final = "TRUNKLINE_TASK_ID"
AGENT_NAME_VARIABLE: Final = "TRUNKLINE_AGENT_NAME"
TASK_DESCRIPTION_VARIABLE: Final = "TRUNKLINE_TASK_DESCRIPTION"
# What a spawned agent finds there as well (AM-09): who it is, where its private key lies, where it speaks MCP.
AGENT_ID_VARIABLE: Final = "AGENT_ID"
AGENT_KEY_VARIABLE: Final = "AGENT_KEY_PATH"
MCP_URL_VARIABLE: Final = "MCP_SERVER_URL"
# No secret is shorter, and without each `1` of a text there is little left to read.
_SECRET_LENGTH: Final = 4
_NO_SECRETS: Final = (
    HUB_URL_VARIABLE,
    AGENT_ID_VARIABLE,
    AGENT_KEY_VARIABLE,
    MCP_URL_VARIABLE,
    CA_VARIABLE,
)


class LaunchFailed(TrunklineError):
    """An agent was not started, and nothing of it is left. The message may be shown to whoever asked for it:
    it holds no token.
    """


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One agent to start for one task. `environment` holds its token and the addresses it needs, so it is
    not shown by `repr`; `description` is the task's.
    """

    container: str
    task_id: str
    agent_name: str
    image: str
    description: str
    environment: dict[str, str]
    hardened: bool = False

    def __repr__(self) -> str:
        return f"LaunchSpec(container={self.container!r}, task_id={self.task_id!r}, image={self.image!r}, …)"

    def agent_environment(self) -> dict[str, str]:
        """What the agent finds in its environment for this task."""
        return {
            TASK_ID_VARIABLE: self.task_id,
            AGENT_NAME_VARIABLE: self.agent_name,
            TASK_DESCRIPTION_VARIABLE: self.description,
            **self.environment,
        }

    def blanked(self, text: str) -> str:
        """`text` without the values in `environment` other than names and addresses: any may be the token."""
        values = (value for name, value in self.environment.items() if name not in _NO_SECRETS)
        for value in sorted(values, key=len, reverse=True):
            if len(value) >= _SECRET_LENGTH:
                text = text.replace(value, BLANK)
        return text


class Started(msgspec.Struct, frozen=True):
    """What runs: `handle` names this run on `host` and no other; `port` is where it listens, if it does."""

    handle: str
    host: str
    port: int | None = None


class Launcher(Protocol):
    """Runs agents somewhere. Its methods may be called from several threads at once."""

    def start(self, spec: LaunchSpec) -> Started:
        """Start an agent. The same container for the same task again, while it runs, is the same run.
        Raises LaunchFailed.
        """

    def alive(self, handle: str) -> bool:
        """Whether what was started still runs. False for any handle that is not of this launcher's making."""

    def find(self, container: str) -> str | None:
        """The handle of what was started for a container and has not been stopped, None when there is none."""

    def stop(self, handle: str, grace_s: float) -> None:
        """Ask it to end, wait at most `grace_s` seconds, then end it; returns when it is gone. What is gone
        already, or is not of this launcher's making, is left alone. Raises TrunklineError when it does not end.
        """
