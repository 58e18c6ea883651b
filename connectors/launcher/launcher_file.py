"""`conf/launchers.yaml`: which command runs an agent, by the image that its definition names (HH-05)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import psutil
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from connectors.organism.unique_yaml import UniqueKeyLoader
from schemas.settings.settings import PROJECT_ROOT, SettingsError
from schemas.wire.wire_body import Printable

LAUNCHERS_FILE: Final = "conf/launchers.yaml"
# What a hardened agent may use unless its rule says otherwise.
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
    """How one image is run. `{python}` and `{project}` stand for this Python and this checkout in the words
    of the command, in `working_dir` and in the values of `environment`; other braces stand for themselves.

    The numbers bind hardened agents. `processes` come on top of those that the user has when it starts:
    the kernel counts all of a user's together, and does not hold root to it.
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
        """The command as it is run."""
        return [_filled(word) for word in self.command]

    def filled_environment(self) -> dict[str, str]:
        """The variables as they are set."""
        return {name: _filled(value) for name, value in self.environment.items()}

    def folder(self) -> Path:
        """Where the command is run: `working_dir`, seen from the checkout, which is also the default."""
        return PROJECT_ROOT if self.working_dir is None else PROJECT_ROOT / _filled(self.working_dir)

    def limits(self) -> dict[str, int]:
        """What a hardened agent is held to, from now on, by the names in `resource`."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory_mb * _MB,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_NPROC": _threads_of_this_user() + self.processes,
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": FILE_MB * _MB,
        }


def read_launchers(path: Path) -> dict[str, LaunchRule]:
    """The rules by image. Raises SettingsError that names the file, the image and the key."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)  # noqa: S506  a safe one
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read the launchers from {path}: {error}") from error
    except (RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Nested too deep; and the library's own, of values with a tag that they do not fit.
        raise SettingsError(f"cannot read the launchers from {path}: {type(error).__name__}") from None
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
    # Without the input: what somebody has put into an environment may be secret.
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
