"""Agent definitions (HH-01): which agents there are, one JSON file each in `conf/agents/`.

    watch = DefinitionWatch(PROJECT_ROOT / "conf" / "agents")
    while (found := watch.changed()) is None: ...

A file is taken whole or not at all. What is wrong with one is told by its name, and the others are read.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from connectors.terminal.terminal_text import escaped
from schemas.streams.agents.agent_registry import DESCRIPTION_LIMIT
from schemas.streams.principal.principals import RESERVED_PRINCIPALS
from schemas.wire.strict_json import MalformedJsonError, decode
from schemas.wire.wire_body import IMAGE_LIMIT, Capabilities, Name, Printable, first_fault

DEFINITION_BYTES: Final = 64 * 1024
# How old the last change of a file must be before its times prove that it was not changed since: a file
# system's clock ticks in milliseconds, and two writes within a tick look like one.
_SETTLED_NS: Final = 1_000_000_000


def _free(name: str) -> str:
    # Whoever had the token of its task would read that mailbox, and stand under that name in the log.
    if name in RESERVED_PRINCIPALS:
        raise ValueError(f"{name} is a name that the programs use themselves")
    return name


class AgentDefinition(BaseModel):
    """An agent that tasks can be given to. `image` says what runs it, by `conf/launchers.yaml`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[Name, AfterValidator(_free)]
    image: Annotated[Printable, Field(min_length=1, max_length=IMAGE_LIMIT)]
    description: Annotated[Printable, Field(max_length=DESCRIPTION_LIMIT)] = ""
    capabilities: Capabilities = []
    hardened: bool = False


@dataclass(frozen=True)
class Definitions:
    """What a folder holds: the agents by name, and what is wrong with the other files, by file name."""

    agents: dict[str, AgentDefinition] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


class _Unreadable(Exception):
    """A file cannot be taken. The message says why."""


def read_definitions(folder: Path) -> Definitions:
    """All definitions of a folder. Never raises for what stands in it, nor when it is not there: then there
    are no agents, and one fault under the folder's name.
    """
    try:
        names = _file_names(folder)
    except OSError as error:
        return Definitions(faults={escaped(folder.name): f"the folder cannot be read: {error.strerror}"})
    found: dict[str, AgentDefinition] = {}
    faults: dict[str, str] = {}
    for name in names:
        try:
            found[name] = _definition(_content(folder / name))
        except _Unreadable as error:
            faults[escaped(name)] = str(error)
    files: dict[str, list[str]] = {}
    for name, definition in found.items():
        files.setdefault(definition.name, []).append(name)
    agents: dict[str, AgentDefinition] = {}
    for agent, holders in files.items():
        if len(holders) == 1:
            agents[agent] = found[holders[0]]
            continue
        for holder in holders:
            others = ", ".join(escaped(other) for other in holders if other != holder)
            faults[escaped(holder)] = f"name: {agent} is the name in {others}, too"
    return Definitions(agents, faults)


class DefinitionWatch:
    """Says when the definitions of a folder have changed. It is asked: it has no thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: object = None
        self._told: Definitions | None = None

    def changed(self) -> Definitions | None:
        """The definitions when they are others than those told last, None when not. The first answer tells
        them all. Files are read only when one has changed, or was changed so recently that its times prove
        nothing.
        """
        now_ns = time.time_ns()
        # Looked at before the files are read: what changes in between is seen the next time.
        seen = _looks(self._folder)
        if seen is not None and seen == self._seen:
            return None
        found = read_definitions(self._folder)
        times = [moment for look in seen or () for moment in look[1:3]]
        self._seen = seen if all(now_ns - moment > _SETTLED_NS for moment in times) else None
        if found == self._told:
            return None
        self._told = found
        return found


def _file_names(folder: Path) -> list[str]:
    """The definitions' files. An editor's own files are hidden or end otherwise. Raises OSError."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    return sorted(name for name in names if name.endswith(".json") and not name.startswith("."))


def _looks(folder: Path) -> list[tuple[Any, ...]] | None:
    """What tells a changed file from one that is as it was; None for a folder that cannot be listed."""
    try:
        names = _file_names(folder)
    except OSError:
        return None
    looks: list[tuple[Any, ...]] = []
    for name in names:
        try:
            seen = (folder / name).stat()
        except OSError as error:
            looks.append((name, 0, 0, error.errno))
        else:
            # Beside mtime also ctime: a file that becomes readable has no other mtime.
            looks.append((name, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_dev, seen.st_ino))
    return looks


def _content(path: Path) -> bytes:
    """What the file holds. Raises _Unreadable, also for what is no file or was written meanwhile."""
    try:
        # Not to wait for the writer of a pipe that somebody has put there.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise _Unreadable("not a file")
            content = file.read(DEFINITION_BYTES + 1)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise _Unreadable(f"cannot be read: {error.strerror}") from None
    if len(content) > DEFINITION_BYTES:
        raise _Unreadable(f"larger than {DEFINITION_BYTES} bytes")
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise _Unreadable("was written while it was read")
    return content


def _definition(content: bytes) -> AgentDefinition:
    """The definition in a file's content. Raises _Unreadable."""
    try:
        document, _ = decode(content)
    except MalformedJsonError as error:
        raise _Unreadable(str(error)) from None
    if not isinstance(document, dict):
        raise _Unreadable("not an object")
    # The model's own message does not say which key: in a file of the operator's own, that is what helps.
    if unknown := _listed(key for key in document if key not in AgentDefinition.model_fields):
        raise _Unreadable(f"unknown: {unknown}")
    try:
        return AgentDefinition.model_validate(document)
    except ValidationError as error:
        raise _Unreadable(first_fault(error)) from None


def _listed(keys: Iterable[str]) -> str:
    return escaped(", ".join(keys))[:200]
