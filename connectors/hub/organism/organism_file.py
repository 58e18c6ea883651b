"""Read `conf/organism.yaml` (XP-09), the file that declares the listeners of the XML pump, and validate it.

    organism = load_organism(path)      # .listeners, .digest

A model checks the file. A child process describes the handlers, because they are users' code, which a gateway
must not import. Every fault is an OrganismError that names the place in the file and says what to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from connectors.hub.organism.declared_files import (
    PAYLOAD_FIELDS,
    Described,
    FreeName,
    InvalidYaml,
    PlainLoader,
    describe_handlers,
    load_yaml,
    read_definitions,
)
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.control.organism import (
    CONCURRENCY,
    CONCURRENCY_MOST,
    LISTENERS_MOST,
    PER_MINUTE_MOST,
    TIMEOUT_MS,
    TIMEOUT_MS_MOST,
    Listener,
    RootTag,
)
from schemas.wire.wire_body import Name, Note, words_of
from trunkline_agent.errors import TrunklineError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.strict_json import canonical

FILE_BYTES: Final = 1024 * 1024
META: Final = "meta"
META_NAMESPACE: Final = "urn:trunkline:meta:1"
# The namespace of messages to a person. Not that of the tag for texts: otherwise a person would get all answers
# in plain text.
HUMAN_NAMESPACE: Final = "urn:trunkline:human:1"
_PROMPT_LIMIT: Final = 32 * 1024
Describe = Callable[[Sequence[str]], Mapping[str, Described]]


class OrganismError(TrunklineError):
    """The organism file, or a listener in it, is invalid. The message says where, and what to do."""


_Namespace = Annotated[str, Field(max_length=200, pattern=r"^[!-~]*\z")]
_Attribute = Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*\z")]
_Tools = Annotated[list[Name], Field(max_length=LISTENERS_MOST)]
_TimeoutS = Annotated[float, Field(gt=0, le=TIMEOUT_MS_MOST / 1000)]
_Concurrency = Annotated[int, Field(ge=1, le=CONCURRENCY_MOST)]
_PerMinute = Annotated[int, Field(ge=1, le=PER_MINUTE_MOST)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Entry(_Section):
    name: FreeName
    capability: Note = ""
    concurrency: _Concurrency = CONCURRENCY
    per_minute: _PerMinute | None = None
    timeout_s: _TimeoutS = TIMEOUT_MS / 1000


class ListenerEntry(_Entry):
    """One entry of `listeners` in the file: a listener with a handler, or a person.

    Attributes:
        type: `handler` for a listener whose messages go to a function; `human` for a person.
        handler: the function that handles the listener's messages, as `module:attribute`. A person has none.
        description: a text for language models, for which the listener is a tool. By default the docstring of
            the handler's payload class.
        root_tag: the root element of the listener's messages. By default that of the handler's payload class;
            for a human, the listener's name.
        namespace: the XML namespace of the listener's messages. By default that of the handler's payload class.
        tools: the listeners that this one sees and may write to. By default all.
    """

    type: Literal["handler", "human"] = "handler"
    description: Note = ""
    root_tag: RootTag | None = None
    namespace: _Namespace | None = None
    handler: _Attribute | None = None
    tools: _Tools | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> ListenerEntry:
        if self.type == "handler" and self.handler is None:
            raise ValueError("handler: a listener needs one, as my_module:my_handler; or type: human")
        if self.type == "human" and self.handler is not None:
            raise ValueError("handler: a human has none; leave it out")
        return self


class AgentEntry(_Entry):
    """One entry of `agents` in the file: a listener that is a language model.

    Attributes:
        model: the name of the language model.
        client: the class or function that calls the model, as `module:attribute`.
        visible_tools: the listeners that this one sees and may write to. By default all.
        tokens_per_minute: how many tokens the model may use in a minute. By default there is no limit.
    """

    type: Literal["llm"] = "llm"
    root_tag: RootTag
    namespace: _Namespace
    model: Annotated[str, Field(min_length=1, max_length=200)]
    system_prompt: Annotated[str, Field(max_length=_PROMPT_LIMIT)] = ""
    client: _Attribute
    visible_tools: _Tools | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=10**9)] | None = None


class MetaEntry(_Section):
    """The entry `meta` in the file: the principals that may list listeners and request schemas (XP-14).

    Each field is `all` (every listener and principal), `admin` (the operator alone) or `none`.
    """

    allow_list_capabilities: Literal["admin", "all", "none"] = "none"
    allow_schema_requests: Literal["admin", "all", "none"] = "none"


class OrganismPlan(_Section):
    """The validated content of the organism file, before its handlers are described."""

    listeners: Annotated[list[ListenerEntry], Field(max_length=LISTENERS_MOST)] = []
    agents: Annotated[list[AgentEntry], Field(max_length=LISTENERS_MOST)] = []
    meta: MetaEntry | None = None

    @model_validator(mode="after")
    def _has_each_name_once(self) -> OrganismPlan:
        entries: list[_Entry] = [*self.listeners, *self.agents]
        names = [entry.name for entry in entries] + ([META] if self.meta else [])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the name {twice[0]} is used twice; each listener needs a name of its own")
        return self


@dataclass(frozen=True)
class Organism:
    """The listeners of an organism file, complete and in the form in which a record stores them.

    `digest` is the SHA-256 over the file and its described listeners in hex. So it also changes when the
    payload class of a handler changes.
    """

    listeners: list[Listener]
    digest: str


def load_organism(path: Path, describe: Describe = describe_handlers) -> Organism:
    """Read and validate an organism file, describe its handlers, and return its listeners.

    It blocks for a second or two, because a child process imports the handlers.

    Args:
        path: The organism file.
        describe: Returns the descriptions of handlers by name. By default a child process imports them.

    Raises:
        OrganismError: The file cannot be read, is invalid, or names a handler that cannot be described.
    """
    content = read_file(path)
    plan = parsed(content, path)
    listeners = listeners_of(plan, describe, str(path))
    dumped = [listener.model_dump(mode="json") for listener in listeners]
    return Organism(listeners, hashlib.sha256(content + b"\0" + canonical({"listeners": dumped})).hexdigest())


def read_file(path: Path) -> bytes:
    """Return the bytes of the organism file. Raises OrganismError if it is unreadable or larger than 1 MiB."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise OrganismError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > FILE_BYTES:
        raise OrganismError(f"{path} is larger than {FILE_BYTES} bytes")
    return content


def parsed(content: bytes, path: Path) -> OrganismPlan:
    """Parse and validate the YAML of an organism file, without importing its handlers.

    `path` only appears in error messages. Raises OrganismError for invalid content. Empty content is valid.
    """
    try:
        loaded = load_yaml(content, PlainLoader)
    except InvalidYaml as error:
        raise OrganismError(f"{path} is not valid YAML: {escaped(str(error))[:300]}") from None
    if loaded is None:
        return OrganismPlan()
    try:
        return OrganismPlan.model_validate(loaded)
    except ValidationError as error:
        raise OrganismError(f"{path}: " + "; ".join(_faults(error, loaded))) from None


def listeners_of(plan: OrganismPlan, describe: Describe, where: str) -> list[Listener]:
    """Describe the handlers of a validated file, and return all its listeners as a record stores them.

    Args:
        plan: The content of the file, as `parsed` returns it.
        describe: Returns the descriptions of handlers by name, such as `describe_handlers`.
        where: The file's name for error messages.

    Raises:
        OrganismError: A handler cannot be described, or an entry contradicts its handler's payload class.
    """
    handlers = sorted({entry.handler for entry in plan.listeners if entry.handler is not None})
    known = describe(handlers) if handlers else {}
    found = [listener_of(entry, known, where) for entry in plan.listeners]
    found += [agent_of(entry) for entry in plan.agents]
    if plan.meta is not None:
        found.append(_meta_of(plan.meta))
    return found


def listener_of(entry: ListenerEntry, known: Mapping[str, Described], where: str) -> Listener:
    """Turn an entry of `listeners` into a listener as a record stores it.

    Args:
        entry: The entry.
        known: The descriptions of handlers by name, as `describe_handlers` returns them. It must have the
            entry's handler; otherwise KeyError is raised.
        where: The origin of the entry for error messages, such as the file's name.

    Raises:
        OrganismError: The handler could not be described, or has another root tag or namespace than the entry.
    """
    place = f"{where}: listener {entry.name}"
    payload: dict[str, str] = {
        "root_tag": entry.root_tag or entry.name,
        "namespace": HUMAN_NAMESPACE if entry.namespace is None else entry.namespace,
    }
    if entry.handler is not None:
        described = known[entry.handler]
        if described.fault is not None:
            raise OrganismError(f"{place}: handler {entry.handler}: {described.fault}")
        for field in ("root_tag", "namespace"):
            written, actual = getattr(entry, field), getattr(described, field)
            if written is not None and written != actual:
                raise OrganismError(
                    f"{place}: {field} is {written!r}, but the class that {entry.handler} takes has "
                    f"{actual!r}; change one of the two, or leave it out"
                )
        payload = {name: getattr(described, name) for name in PAYLOAD_FIELDS}
    return _listener(
        place,
        **_shared(entry),
        **payload,
        handler=entry.handler,
        visible_tools=entry.tools,
        options=canonical({"description": entry.description}).decode("utf-8") if entry.description else None,
    )


def _shared(entry: ListenerEntry | AgentEntry) -> dict[str, Any]:
    fields = entry.model_dump(include={"name", "type", "capability", "concurrency", "per_minute"})
    return {**fields, "timeout_ms": round(entry.timeout_s * 1000)}


def entry_from(fields: Mapping[str, Any], where: str) -> ListenerEntry | AgentEntry:
    """Validate the fields of one listener, and return an AgentEntry for the type `llm`, else a ListenerEntry.

    `fields` are named as in an entry of conf/organism.yaml. `where` is their origin for error messages. Raises
    OrganismError for invalid fields.
    """
    model = AgentEntry if fields.get("type") == "llm" else ListenerEntry
    given = dict(fields)
    if model is AgentEntry and "tools" in given:
        given["visible_tools"] = given.pop("tools")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise OrganismError(f"{where}: " + "; ".join(_faults(error, given))) from None


def agent_of(entry: AgentEntry) -> Listener:
    """Turn an entry of `agents` into a listener as a record stores it. Raises OrganismError if invalid."""
    options = {"client": entry.client, "model": entry.model, "system_prompt": entry.system_prompt}
    return _listener(
        f"agent {entry.name}",
        **_shared(entry),
        root_tag=entry.root_tag,
        namespace=entry.namespace,
        visible_tools=entry.visible_tools,
        tokens_per_minute=entry.tokens_per_minute,
        options=canonical(options).decode("utf-8"),
    )


def _meta_of(entry: MetaEntry) -> Listener:
    return _listener(
        META,
        name=META,
        type=META,
        capability="tells which listeners there are, and their schemas",
        root_tag=META,
        namespace=META_NAMESPACE,
        options=canonical(entry.model_dump()).decode("utf-8"),
    )


def _listener(place: str, **fields: Any) -> Listener:
    try:
        return Listener.model_validate(fields)
    except ValidationError as error:
        raise OrganismError(f"{place}: " + "; ".join(_faults(error, None))) from None


def _faults(error: ValidationError, loaded: Any) -> list[str]:
    """Return the faults, each with its place in words: `listeners, calculator, timeout_s: …`."""
    found = []
    for fault in error.errors(include_input=False, include_url=False):
        place, node = [], loaded
        for part in fault["loc"]:
            node = _below(node, part)
            name = node.get("name") if isinstance(part, int) and isinstance(node, dict) else None
            place.append(
                escaped(name) if isinstance(name, str) else str(part + 1 if isinstance(part, int) else part)
            )
        reason = words_of(fault).removeprefix("Value error, ")
        found.append(f"{escaped(', '.join(place))[:200]}: {reason}" if place else reason)
    return found[:10]


def _below(node: Any, part: object) -> Any:
    try:
        return node[part]
    except (KeyError, IndexError, TypeError):
        return None


def organism_path(settings: Settings) -> Path | None:
    """Return the path of the organism file, or None if the settings name no file or it does not exist."""
    file = settings.xml_pump.organism_file
    return PROJECT_ROOT / file if file is not None and (PROJECT_ROOT / file).exists() else None


def check_organism_names(settings: Settings) -> None:
    """Validate the organism file without importing its handlers, before a stack is started.

    Without an organism file it does nothing. Raises OrganismError if the file is invalid, or a listener has the
    name of an agent in the folder of agent definitions.
    """
    path = organism_path(settings)
    if path is not None:
        plan = parsed(read_file(path), path)
        check_agents(settings, path, [entry.name for entry in (*plan.listeners, *plan.agents)])


def check_agents(settings: Settings, path: Path, names: Iterable[str]) -> None:
    """Raise OrganismError if a listener has the name of an agent in the folder of agent definitions.

    Both would have the same mailbox, so a gateway loads nothing of such a file. Without such a name, it returns
    nothing.

    Args:
        settings: The settings, which name the folder of agent definitions.
        path: The organism file, for the error message.
        names: The names of the listeners in the organism file.
    """
    folder = settings.gateway.agents_dir
    agents = read_definitions(PROJECT_ROOT / folder).agents
    for name in names:
        if name in agents:
            raise OrganismError(
                f"{path}: listener {name}: an agent in {folder} has this name; rename one of the two, or "
                "nothing of this file is loaded"
            )
