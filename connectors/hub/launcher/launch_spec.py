"""The interface of a launcher (HH-05), the description of an agent that it starts, and `conf/launchers.yaml`.

The file has, for each image of an agent definition, the command that runs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
import psutil
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from connectors.hub.organism.declared_files import InvalidYaml, load_yaml
from connectors.plumbing.machine.json_log import BLANK
from schemas.settings.settings import PROJECT_ROOT, SettingsError
from schemas.wire.wire_body import Printable
from trunkline_agent.credentials import (
    AGENT_ID_VARIABLE,
    AGENT_KEY_VARIABLE,
    CA_VARIABLE,
    HUB_URL_VARIABLE,
    MCP_URL_VARIABLE,
    NAME_VARIABLE,
    TOKEN_VARIABLE,
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


LAUNCHERS_FILE: Final = "conf/launchers.yaml"
# The limits of a hardened agent unless its rule sets others.
CPU_SECONDS: Final = 3600
MEMORY_MB: Final = 2048
OPEN_FILES: Final = 256
PROCESSES: Final = 64
FILE_MB: Final = 256

_MB: Final = 1024 * 1024
_IMAGE_LIMIT: Final = 255
_VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\z", max_length=128)]


def _with_a_program(command: list[str]) -> list[str]:
    if not command[0]:
        raise ValueError("begins with an empty word")
    return command


class LaunchRule(BaseModel):
    """The command that runs agents of one image, as `conf/launchers.yaml` has it.

    `{python}` and `{project}` are replaced by this Python and this checkout: in the words of the command, in
    `working_dir` and in the values of `environment`. Other braces are kept.

    The limits apply to hardened agents. `processes` are added to the number that the user has at the start,
    because the kernel counts all processes of a user together. The kernel does not apply that limit to root.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    command: Annotated[list[Printable], Field(min_length=1), AfterValidator(_with_a_program)]
    working_dir: Annotated[Printable, Field(min_length=1)] | None = None
    environment: dict[_VariableName, Printable] = {}
    cpu_seconds: int = Field(default=CPU_SECONDS, ge=1, le=2**31)
    memory_mb: int = Field(default=MEMORY_MB, ge=16, le=2**24)
    open_files: int = Field(default=OPEN_FILES, ge=8, le=2**20)
    processes: int = Field(default=PROCESSES, ge=1, le=2**20)

    def filled_command(self) -> list[str]:
        """Return the command's words with `{python}` and `{project}` replaced."""
        return [_filled(word) for word in self.command]

    def filled_environment(self) -> dict[str, str]:
        """Return the rule's variables with `{python}` and `{project}` replaced in their values."""
        return {name: _filled(value) for name, value in self.environment.items()}

    def folder(self) -> Path:
        """Return the folder in which the command runs. `working_dir` is relative to the checkout.

        Without a `working_dir`, it is the checkout.
        """
        return PROJECT_ROOT if self.working_dir is None else PROJECT_ROOT / _filled(self.working_dir)

    def limits(self) -> dict[str, int]:
        """Return the resource limits for a hardened agent that starts now.

        The keys are names of the module `resource`, such as `RLIMIT_CPU`. The limit of processes is the number
        of threads that the user has now plus `processes`.
        """
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory_mb * _MB,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_NPROC": _threads_of_this_user() + self.processes,
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": FILE_MB * _MB,
        }


def read_launchers(path: Path) -> dict[str, LaunchRule]:
    """Parse the launchers file, and return its rules by image; an empty dictionary for an empty file.

    Raises:
        SettingsError: The file cannot be read or is invalid. The message names the file, the image and the key.
    """
    try:
        loaded = load_yaml(path.read_bytes())
    except (OSError, InvalidYaml) as error:
        raise SettingsError(f"cannot read the launchers from {path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path}: expected a mapping of images, found {type(loaded).__name__}")
    rules: dict[str, LaunchRule] = {}
    for image, rule in loaded.items():
        if not isinstance(image, str) or not 0 < len(image) <= _IMAGE_LIMIT or not image.isprintable():
            raise SettingsError(
                f"{path}: {image!r}: an image is printable text of at most {_IMAGE_LIMIT} characters"
            )
        try:
            rules[image] = LaunchRule.model_validate(rule)
        except ValidationError as error:
            raise SettingsError(f"{path}: " + "; ".join(_faults(image, error))) from None
    return rules


def _faults(image: str, error: ValidationError) -> list[str]:
    # Without the input: an environment may contain secrets.
    return [
        f"{' '.join((image, '.'.join(str(part) for part in fault['loc']))).strip()}: {fault['msg']}"
        for fault in error.errors(include_input=False, include_url=False)
    ]


def _threads_of_this_user() -> int:
    found = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
    mine = [info for info in found if info["uids"] is not None and info["uids"].real == os.getuid()]
    return sum(info["num_threads"] or 0 for info in mine)


def _filled(text: str) -> str:
    return text.replace("{python}", sys.executable).replace("{project}", str(PROJECT_ROOT))
