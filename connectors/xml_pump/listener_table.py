"""The listeners that a pump can run, each with its handler and its pipelines; swapped as one when the organism
changes (XP-01, XP-09, XP-12).

What runs keeps what it began with: a swap makes a new table and changes nothing in the old one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import structlog

from connectors.xml_payloads.deliveries import ListenerInfo
from connectors.xml_payloads.payload_types import PayloadType
from connectors.xml_payloads.schema_cache import cached_schema
from connectors.xml_pump.handlers import (
    Handler,
    HandlerError,
    attribute_in,
    handler_in,
    imported,
    imported_anew,
    split_name,
)
from connectors.xml_pump.llm_client import LlmClient, client_of
from connectors.xml_pump.pipeline import Pipeline
from connectors.xml_wire.faults import XmlLimits

log = structlog.stdlib.get_logger(__name__)

HANDLER, LLM, META, HUMAN = "handler", "llm", "meta", "human"
RAW_ARGUMENT: Final = "xml"


@dataclass(frozen=True, slots=True)
class RunnableListener:
    """A listener with all that is needed to run it. `pipelines`: by root tag, of what it takes; what it
    understands as an answer is in `reply_pipelines`.
    """

    info: ListenerInfo
    handler: Handler | None = None
    client: LlmClient | None = None
    pipelines: Mapping[str, Pipeline] = field(default_factory=dict)
    reply_pipelines: Mapping[str, Pipeline] = field(default_factory=dict)

    @property
    def kind(self) -> PayloadType | None:
        """The payload that its handler takes."""
        return None if self.handler is None else self.handler.payload


@dataclass(frozen=True, slots=True)
class ListenerTable:
    """All listeners by name, and those of them that can run here."""

    version: int = -1
    listeners: Mapping[str, ListenerInfo] = field(default_factory=dict)
    runnable: Mapping[str, RunnableListener] = field(default_factory=dict)

    def tools_of(self, info: ListenerInfo) -> tuple[Mapping[str, Any], ...]:
        """What a listener sees of the others, as a language model is told of them (XP-09)."""
        seen = sorted(name for name in self.listeners if info.sees(name))
        return tuple(self._tool(self.listeners[name]) for name in seen)

    def kind_of(self, name: str) -> PayloadType | None:
        """The payload type of a listener, where there is a class."""
        found = self.runnable.get(name)
        return None if found is None else found.kind

    def _tool(self, info: ListenerInfo) -> Mapping[str, Any]:
        """Describe a listener as a tool: by the file's description, else its class's docstring, else its
        capability, which may be no more than a label.
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
    """Makes a table of the listeners that the gateway names, and remembers which modules it has loaded.

    A module is loaded anew when its file has changed since; what it imports itself is not.
    """

    def __init__(
        self,
        schemas_folder: Path,
        limits: XmlLimits,
    ) -> None:
        self._schemas_folder = schemas_folder
        self._limits = limits
        self._modules: dict[str, tuple[str, ModuleType]] = {}
        self._system = Pipeline(None, limits=limits)

    @property
    def system_pipeline(self) -> Pipeline:
        """The pipeline for what is bound for no listener's class (XP-10)."""
        return self._system

    def make(self, version: int, infos: Sequence[ListenerInfo]) -> ListenerTable:
        """A table of these listeners. What cannot be loaded is told in the log, and not run here."""
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
        """The module, looked at once for each table."""
        if name in looked_at:
            return looked_at[name]
        known = self._modules.get(name)
        if known is None or known[0] != _source_digest(known[1]):
            module = imported(name) if known is None else imported_anew(name)
            known = self._modules[name] = (_source_digest(module), module)
        looked_at[name] = known[1]
        return known[1]


def _source_digest(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    try:
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return "gone"
