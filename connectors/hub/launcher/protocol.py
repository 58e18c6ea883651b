"""The interface of a launcher (HH-05), and the description of an agent that it starts for a task."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from connectors.plumbing.machine.json_log import BLANK
from trunkline_agent.credentials import HUB_URL_VARIABLE, NAME_VARIABLE, TOKEN_VARIABLE
from trunkline_agent.environment import (
    AGENT_ID_VARIABLE,
    AGENT_KEY_VARIABLE,
    CA_VARIABLE,
    MCP_URL_VARIABLE,
)
from trunkline_agent.errors import TrunklineError

# The variables in an agent's environment. The token comes with the spec, the others are made from it.
AGENT_TOKEN_VARIABLE: Final = TOKEN_VARIABLE
AGENT_NAME_VARIABLE: Final = NAME_VARIABLE
TASK_ID_VARIABLE: Final = "TRUNKLINE_TASK_ID"
TASK_DESCRIPTION_VARIABLE: Final = "TRUNKLINE_TASK_DESCRIPTION"
# No secret is shorter. Blanking each `1` in a text would leave little to read.
_SECRET_LENGTH: Final = 4
_NO_SECRETS: Final = (
    HUB_URL_VARIABLE,
    AGENT_ID_VARIABLE,
    AGENT_KEY_VARIABLE,
    MCP_URL_VARIABLE,
    CA_VARIABLE,
)


class LaunchFailed(TrunklineError):
    """An agent could not be started, and no process of it is left.

    The message contains no token, so it may be shown to the client that asked for the agent.
    """


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of one agent to start for one task of the hub.

    Attributes:
        container: The name of the agent's container.
        task_id: The id of the task.
        agent_name: The name of the agent definition.
        image: The key of the agent's rule in `conf/launchers.yaml`.
        description: The description of the task.
        environment: Variables for the agent: its token and the addresses that it needs. `repr` does not show
            them.
        hardened: Whether the agent's resources are limited.
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
        """Return the variables that a launcher must set for the agent.

        These are `environment` and variables with the task's id and description and the agent's name.
        """
        return {
            TASK_ID_VARIABLE: self.task_id,
            AGENT_NAME_VARIABLE: self.agent_name,
            TASK_DESCRIPTION_VARIABLE: self.description,
            **self.environment,
        }

    def blanked(self, text: str) -> str:
        """Return `text` with each secret in `environment` replaced by `[secret]`.

        All values in `environment` count as secrets, except ids, paths, addresses and values of less than four
        characters.
        """
        values = (value for name, value in self.environment.items() if name not in _NO_SECRETS)
        for value in sorted(values, key=len, reverse=True):
            if len(value) >= _SECRET_LENGTH:
                text = text.replace(value, BLANK)
        return text


class Started(msgspec.Struct, frozen=True):
    """The result of a start.

    Attributes:
        handle: The text that names this run of the agent on its host.
        host: The host on which it runs.
        port: The port on which the agent listens. None: it does not, or the port is unknown.
    """

    handle: str
    host: str
    port: int | None = None


class Launcher(Protocol):
    """A program that runs agents, for example as processes of this machine.

    Its methods may be called from several threads at once.
    """

    def start(self, spec: LaunchSpec) -> Started:
        """Start an agent, and return the handle of its run when it runs. The call blocks until then.

        A second call for the same container and task starts no other agent while the first one runs, and
        returns the same handle.

        Raises:
            LaunchFailed: The agent could not be started.
        """

    def alive(self, handle: str) -> bool:
        """Return whether the agent still runs. False for a handle of another launcher.

        `handle` is the one in the result of `start`, which the registry stores with the container.
        """

    def find(self, container: str) -> str | None:
        """Return the handle of the agent that was last started for a container. It may have ended (`alive`).

        None: no agent was started for the container, or the agent was stopped.
        """

    def stop(self, handle: str, grace_s: float) -> None:
        """Ask the agent to end, wait at most `grace_s` seconds, then kill it. Return when it has ended.

        An agent that has ended, and a handle of another launcher, are ignored.

        Raises:
            TrunklineError: The agent does not end.
        """
