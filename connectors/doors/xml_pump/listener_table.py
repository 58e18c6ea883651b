"""The listeners that a pump can run, each with its handler and its pipelines (XP-01, XP-09, XP-12).

A change of the organism makes a new table and leaves the old one as it is: messages in progress keep the table
that they began with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import structlog

from connectors.doors.xml_pump.handlers import (
    Handler,
    HandlerError,
    attribute_in,
    handler_in,
    imported,
    split_name,
)
from connectors.doors.xml_pump.llm_client import LlmClient, client_of
from connectors.doors.xml_pump.pipeline import Pipeline
from connectors.plumbing.xml_payloads.deliveries import ListenerInfo
from connectors.plumbing.xml_payloads.payload_types import PayloadType, cached_schema
from connectors.plumbing.xml_wire.faults import XmlLimits

log = structlog.stdlib.get_logger(__name__)

HANDLER, LLM, META, HUMAN = "handler", "llm", "meta", "human"
RAW_ARGUMENT: Final = "xml"


@dataclass(frozen=True, slots=True)
class RunnableListener:
    """A listener of the organism, with the loaded code that is needed to handle its messages.

    Attributes:
        info: The description of the listener by the gateway.
        handler: Its function; None for a listener of another type.
        client: The client of its language model; None for a listener of another type.
        pipelines: The checks of the messages that it takes, by root tag.
        reply_pipelines: The checks of the answers to its own messages that it understands, by root tag.
    """

    info: ListenerInfo
    handler: Handler | None = None
    client: LlmClient | None = None
    pipelines: Mapping[str, Pipeline] = field(default_factory=dict)
    reply_pipelines: Mapping[str, Pipeline] = field(default_factory=dict)

    @property
    def kind(self) -> PayloadType | None:
        """The payload type that the listener's handler takes; None for a listener without a handler."""
        return None if self.handler is None else self.handler.payload


@dataclass(frozen=True, slots=True)
class ListenerTable:
    """The listeners of one version of the organism, by name, and those of them that this process can run."""

    version: int = -1
    listeners: Mapping[str, ListenerInfo] = field(default_factory=dict)
    runnable: Mapping[str, RunnableListener] = field(default_factory=dict)

    def tools_of(self, info: ListenerInfo) -> tuple[Mapping[str, Any], ...]:
        """Return the listeners that the listener `info` sees, as tools for a language model (XP-09).

        Each tool has `name`, `description` and `input_schema`. They are sorted by name; empty when it sees
        none.
        """
        seen = sorted(name for name in self.listeners if info.sees(name))
        return tuple(self._tool(self.listeners[name]) for name in seen)

    def kind_of(self, name: str) -> PayloadType | None:
        """Return the payload type that the listener `name` takes.

        None means that the listener has no handler, cannot run here or is unknown.
        """
        found = self.runnable.get(name)
        return None if found is None else found.kind

    def _tool(self, info: ListenerInfo) -> Mapping[str, Any]:
        """Return a listener's description as a tool.

        The text is the description in the organism's file, else the docstring of the class, else the
        capability, which may be only a label.
        """
        kind, given = self.kind_of(info.name), str(info.options.get("description") or "")
        if kind is not None:
            derived = kind.tool_description
            about = given or derived["description"] or info.capability
            return {"name": info.name, "description": about, "input_schema": derived["input_schema"]}
        how = f'the whole payload as XML: <{info.root_tag} xmlns="{info.namespace}">…</{info.root_tag}>'
        schema = {
            "type": "object",
            "properties": {RAW_ARGUMENT: {"type": "string", "description": how}},
            "required": [RAW_ARGUMENT],
        }
        return {"name": info.name, "description": given or info.capability, "input_schema": schema}


class TableMaker:
    """A factory of listener tables, which imports the handlers and remembers the imported modules.

    A module is imported again when its file has changed since. The modules that it imports are not.

    Args:
        schemas_folder: The folder in which the XML schemas of listeners are cached.
        limits: The limits for the XML of messages.
    """

    def __init__(self, schemas_folder: Path, limits: XmlLimits) -> None:
        self._schemas_folder = schemas_folder
        self._limits = limits
        self._modules: dict[str, tuple[str, ModuleType]] = {}
        # The pipeline for messages that no listener's class describes (XP-10).
        self.system_pipeline = Pipeline(None, limits=limits)

    def make(self, version: int, infos: Sequence[ListenerInfo]) -> ListenerTable:
        """Import the handlers of the listeners `infos`, and return a new table of the listeners.

        Blocks while it runs users' code, so call it on a thread. A listener that cannot be loaded raises
        nothing: it is logged, and is missing in the table's `runnable`. Human listeners, which have no code,
        are missing there too. `version` is the organism's version that `infos` describe.
        """
        looked_at: dict[str, ModuleType] = {}
        runnable: dict[str, RunnableListener] = {}
        for info in infos:
            if info.type == HUMAN:
                continue
            try:
                runnable[info.name] = self._runnable(info, looked_at)
            except (HandlerError, OSError, ValueError) as error:
                log.error("listener_not_loaded", listener=info.name, why=str(error))
        return ListenerTable(version, {info.name: info for info in infos}, runnable)

    def _runnable(self, info: ListenerInfo, looked_at: dict[str, ModuleType]) -> RunnableListener:
        if info.type == META:
            return RunnableListener(info)
        if info.type == LLM:
            named = str(info.options.get("client") or "")
            module, attribute = split_name(named)
            client = client_of(attribute_in(self._module(module, looked_at), attribute), named)
            return RunnableListener(info, client=client)
        module, attribute = split_name(info.handler or "")
        handler = handler_in(self._module(module, looked_at), attribute)
        kind = handler.payload
        if (kind.root_tag, kind.namespace) != (info.root_tag, info.namespace):
            raise HandlerError(f"it is to take <{info.root_tag}>, and its handler takes <{kind.root_tag}>")
        if info.xsd is not None and info.xsd != kind.xsd:
            log.warning("schema_differs", listener=info.name, why="the class has changed since it was recorded")
        schema = cached_schema(self._schemas_folder, info.name, kind)
        return RunnableListener(
            info,
            handler,
            pipelines={kind.root_tag: Pipeline(kind, schema, self._limits)},
            reply_pipelines={one.root_tag: Pipeline(one, limits=self._limits) for one in handler.replies},
        )

    def _module(self, name: str, looked_at: dict[str, ModuleType]) -> ModuleType:
        """Return the module. Each table checks it for changes once."""
        if name in looked_at:
            return looked_at[name]
        known = self._modules.get(name)
        if known is None or known[0] != _source_digest(known[1]):
            module = imported(name, anew=known is not None)
            known = self._modules[name] = (_source_digest(module), module)
        looked_at[name] = known[1]
        return known[1]


def _source_digest(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    try:
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return "gone"
