"""Reads `conf/launchers.yaml`: for each image of an agent definition, the command that runs it (HH-05)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import psutil
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from connectors.hub.organism.unique_yaml import InvalidYaml, load_yaml
from schemas.settings.settings import PROJECT_ROOT, SettingsError
from schemas.wire.wire_body import Printable

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
