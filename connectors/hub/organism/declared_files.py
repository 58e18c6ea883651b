"""Strict readers of the files that declare agents, and descriptions of the handlers that a file names.

    watch = DefinitionWatch(PROJECT_ROOT / "conf" / "agents")
    while (found := watch.changed()) is None: ...

Each JSON file in `conf/agents/` declares one agent. An invalid file is ignored as a whole and reported by its
name. The other files are read. A key that is written twice in one YAML mapping is refused, of which YAML would
use the last one.

A child process that imports users' code finds out which XML each handler accepts (XP-01, XP-09):

    describe_handlers(["shop.pricing:price"])["shop.pricing:price"].root_tag

A gateway never imports users' code itself. The child is `python -m connectors.doors.xml_pump.describe`. Its
time is limited, and its environment has none of Trunkline's secrets.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from schemas.settings.settings import ENV_PREFIX, PROJECT_ROOT
from schemas.streams.agents.agent_registry import DESCRIPTION_LIMIT
from schemas.streams.principal.principals import RESERVED_PRINCIPALS
from schemas.wire.wire_body import IMAGE_LIMIT, Capabilities, Name, Printable, first_fault
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.strict_json import MalformedJsonError, decode


class InvalidYaml(ValueError):
    """The text is not YAML, or has a construct that is not supported. The message says why, in one line."""


class UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that raises ComposerError for a key that one mapping has twice. The error has the line."""

    # Before the values are constructed: `<<` adds the keys of another mapping to those that are written.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of one mapping. PyYAML calls this. Raises ComposerError for a repeated key."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"the key {key.value!r} is written twice", key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


class PlainLoader(UniqueKeyLoader):
    """A YAML loader that also refuses aliases (`*name`), which can make a short file expand to a huge one."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node. PyYAML calls this. Raises ConstructorError for an alias."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "an alias; write it out", event.start_mark)
        return super().compose_node(parent, index)


def load_yaml(content: bytes, loader: type[UniqueKeyLoader] = UniqueKeyLoader) -> Any:
    """Parse a YAML text in UTF-8 and return its value, as dicts, lists and scalars.

    Args:
        content: The text. Empty content gives None.
        loader: `UniqueKeyLoader` allows aliases, `PlainLoader` does not.

    Raises:
        InvalidYaml: The text is not UTF-8 or YAML, repeats a key, or has a construct that the loader refuses.
    """
    try:
        return yaml.load(content.decode("utf-8"), loader)  # noqa: S506  a safe one
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidYaml(" ".join(str(error).split())) from None
    except (RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:
        # RecursionError: nested too deep. PyYAML raises the others for values that do not fit their tag.
        raise InvalidYaml(type(error).__name__) from None


DEFINITION_BYTES: Final = 64 * 1024
# Equal times prove that a file is unchanged only if its last change is older than this: the clock of a file
# system ticks in milliseconds, and two writes within a tick have the same time.
_SETTLED_NS: Final = 1_000_000_000


def _free(name: str) -> str:
    # With the token of its task an agent could read a program's mailbox and write records in its name.
    if name in RESERVED_PRINCIPALS:
        raise ValueError(f"{name} is a name that the programs use themselves; choose another")
    return name


FreeName = Annotated[Name, AfterValidator(_free)]


class AgentDefinition(BaseModel):
    """The definition of an agent that can be started for tasks: the content of one file.

    Attributes:
        name: The agent's name.
        image: The name of the command to start, as `conf/launchers.yaml` defines it.
        description: A text about the agent's purpose, for people and for other agents.
        capabilities: The abilities that others can search for.
        hardened: Whether the agent's processes run with restricted rights and resource limits.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: FreeName
    image: Annotated[Printable, Field(min_length=1, max_length=IMAGE_LIMIT)]
    description: Annotated[Printable, Field(max_length=DESCRIPTION_LIMIT)] = ""
    capabilities: Capabilities = []
    hardened: bool = False


@dataclass(frozen=True)
class Definitions:
    """The agent definitions in a folder.

    Attributes:
        agents: The valid definitions, by the agent's name.
        faults: The reason why a file is no valid definition, by file name.
    """

    agents: dict[str, AgentDefinition] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


class _Unreadable(Exception):
    """A file is not a valid definition. The message says why."""


def read_definitions(folder: Path) -> Definitions:
    """Read and validate all agent definitions (`*.json`) in a folder.

    An invalid file raises nothing: it is reported in `faults`. Two files with the same agent name are both
    invalid. If the folder cannot be read, there are no agents and one fault, under the folder's name.
    """
    try:
        names = _file_names(folder)
    except OSError as error:
        return Definitions(faults={escaped(folder.name): f"the folder cannot be read: {error.strerror}"})
    files: dict[str, list[str]] = {}
    agents: dict[str, AgentDefinition] = {}
    faults: dict[str, str] = {}
    for name in names:
        try:
            definition = _definition(_content(folder / name))
        except _Unreadable as error:
            faults[escaped(name)] = str(error)
        else:
            agents[definition.name] = definition
            files.setdefault(definition.name, []).append(escaped(name))
    for agent, holders in files.items():
        if len(holders) > 1:
            del agents[agent]
            for holder in holders:
                others = ", ".join(other for other in holders if other != holder)
                faults[holder] = f"name: {agent} is the name in {others}, too"
    return Definitions(agents, faults)


class DefinitionWatch:
    """A detector of changes in a folder of agent definitions. It has no thread: call `changed` regularly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: object = None
        self._returned: Definitions | None = None

    def changed(self) -> Definitions | None:
        """Return all definitions if they differ from those returned last, or None if nothing changed.

        The first call always returns the definitions. An unreadable folder raises nothing: it is a fault in the
        returned definitions. The files are read only if a file's time or size has changed, or if a file was
        written within the last second.
        """
        now_ns = time.time_ns()
        # Before the files are read, so that the next call sees a change in between.
        seen = _looks(self._folder)
        if seen is not None and seen == self._seen:
            return None
        found = read_definitions(self._folder)
        times = [moment for look in seen or () for moment in look[1:3]]
        self._seen = seen if all(now_ns - moment > _SETTLED_NS for moment in times) else None
        if found == self._returned:
            return None
        self._returned = found
        return found


def _file_names(folder: Path) -> list[str]:
    """Return the names of the definitions' files. An editor's own files are hidden or have another suffix.

    Raises OSError.
    """
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if name.endswith(".json") and not name.startswith("."))


def _looks(folder: Path) -> list[tuple[Any, ...]] | None:
    """Return values that differ for a changed file; None for a folder that cannot be listed."""
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
            # ctime as well: the mtime does not change when a file becomes readable.
            looks.append((name, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_dev, seen.st_ino))
    return looks


def _content(path: Path) -> bytes:
    """Return the content of a regular file. Raises _Unreadable, also if it was written meanwhile."""
    try:
        # O_NONBLOCK: do not wait for the writer of a pipe in place of a file.
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
    """Return the definition in a file's content. Raises _Unreadable."""
    try:
        document, _ = decode(content)
    except MalformedJsonError as error:
        raise _Unreadable(str(error)) from None
    if not isinstance(document, dict):
        raise _Unreadable("not an object")
    # The model's own message does not name the key, which the operator needs to know.
    if unknown := _listed(key for key in document if key not in AgentDefinition.model_fields):
        raise _Unreadable(f"unknown: {unknown}")
    try:
        return AgentDefinition.model_validate(document)
    except ValidationError as error:
        raise _Unreadable(first_fault(error)) from None


def _listed(keys: Iterable[str]) -> str:
    return escaped(", ".join(keys))[:200]


PAYLOAD_FIELDS: Final = ("root_tag", "namespace", "xsd", "example")
DESCRIBE_S: Final = 30.0
_END_S: Final = 5.0
_MODULE: Final = "connectors.doors.xml_pump.describe"
_QUOTED_CHARACTERS: Final = 500
_NOT_FOR_USERS: Final = (ENV_PREFIX, "TRUNKLINE_TOKEN", "TRUNKLINE_AGENT_TOKEN", "MQTT_PASSWORD")


@dataclass(frozen=True)
class Described:
    """The description of the XML payload that a handler accepts.

    Attributes:
        root_tag: The name of the payload's root element.
        namespace: The XML namespace of the root element.
        xsd: The XML schema of the payload.
        example: An example of the payload.
        fault: Why there is no description, and what to do about it; None if there is one. With a fault, the
            other fields are empty.
    """

    root_tag: str = ""
    namespace: str = ""
    xsd: str = ""
    example: str = ""
    fault: str | None = None


def describe_handlers(names: Sequence[str], timeout_s: float = DESCRIBE_S) -> dict[str, Described]:
    """Import handlers in a child process, and return the description of each by its name.

    Errors in users' code raise nothing: the description of the handler has a `fault` instead. The call blocks
    until the child ends or the time is over. Then it kills the processes that the import started.

    Args:
        names: The handlers, each as `module:attribute`.
        timeout_s: The longest time in seconds for all imports. After it, every handler gets a fault.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_FOR_USERS)}
    child = subprocess.Popen(  # noqa: S603  our own program
        [sys.executable, "-m", _MODULE, *names],
        cwd=PROJECT_ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # processes that an import starts end with the child
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        fault = f"it was not imported within {timeout_s:g} s; a module must only define when it is imported"
        return _all(names, fault)
    finally:
        _end(child)
    try:
        answer = json.loads(out.rstrip().rpartition(b"\n")[2])
        return {name: _described(answer[name]) for name in names}
    except (ValueError, KeyError, TypeError):
        why = escaped(err.decode("utf-8", "replace").rstrip().rpartition("\n")[2])[:_QUOTED_CHARACTERS]
        return _all(names, f"it ended the process that imports it (exit code {child.returncode}): {why}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and its process group.

    A process that has left the group may still have the pipes open, so they are not read to their end.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)


def _described(answer: dict[str, Any]) -> Described:
    if "error" in answer:
        return Described(fault=escaped(str(answer["error"]))[:_QUOTED_CHARACTERS])
    return Described(*(str(answer[name]) for name in PAYLOAD_FIELDS))


def _all(names: Sequence[str], fault: str) -> dict[str, Described]:
    return {name: Described(fault=fault) for name in names}
