"""All tools of the agent MCP server, also those that follow from declarations of the hub's operations (AM-04).

An operation with `TOOL` is a tool. Path, query and body are its arguments, and the answer is its result, with
names in camel case. Tools with another spelling are in `tool_arguments.py` and `operation_tools.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Final

from pydantic import create_model
from pydantic.alias_generators import to_camel

from connectors.doors.mcp_tools.agents import tool_arguments
from connectors.doors.mcp_tools.agents.mcp_tool import ToolArguments, described_tools
from connectors.doors.mcp_tools.agents.planned_tools import PlannedTool
from connectors.hub.engine.operation import Answer, Asked, Operation
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.policy import RIGHTS, Reach
from connectors.operations.every_operation import OPERATIONS
from schemas.streams.principal.principals import AGENT
from schemas.wire.record import OutgoingRecord

_GET: Final = "GET"


class DeclaredTool(PlannedTool, Operation):
    """A tool that follows from an operation, which is its other base class."""

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Plan the operation, with its own body or query."""
        for name, model in (("body", self.BODY), ("query", self.QUERY)):
            given = getattr(asked, name)
            if model is not None and not isinstance(given, model):
                fields = {field: getattr(given, field) for field in model.model_fields}
                setattr(asked, name, model.model_validate(fields))
        return super().plan(asked)  # type: ignore[safe-super]  # of the operation

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer | Awaitable[Answer]:
        """Return the answer of the operation, as the tool spells it."""
        found = super().answer(asked, settled)  # type: ignore[safe-super]  # of the operation
        return self._spelled(found) if isinstance(found, Answer) else self._awaited(found)

    async def later(self, asked: Asked) -> Answer:
        """Return the answer of the operation after a wait, as the tool spells it."""
        return self._spelled(await super().later(asked))

    async def _awaited(self, found: Awaitable[Answer]) -> Answer:
        return self._spelled(await found)

    @cached_property
    def _schema(self) -> dict[str, Any]:
        return self.ANSWER.model_json_schema()

    def _spelled(self, found: Answer) -> Answer:
        spelled = _in_camel_case(found.document, self._schema, self._schema.get("$defs", {}))
        return Answer(spelled, found.verdict)


def declared_arguments(operations: Iterable[type[Operation]]) -> dict[str, type[ToolArguments]]:
    """Return the models of the arguments of the operations that are tools, by the tools' names.

    Raises ValueError for an operation that not every agent may carry out.
    """
    found = {}
    for one in operations:
        if one.TOOL is None:
            continue
        if RIGHTS[AGENT].get(one.ACTION) is not Reach.ALL:
            raise ValueError(f"{one.TOOL}: an agent has no right to {one.ACTION} as such")
        fields: dict[str, Any] = {name: (kind, ...) for name, kind in one.PARAMETERS.items()}
        for model in filter(None, (one.QUERY, one.BODY)):
            fields |= {name: (info.annotation, copy(info)) for name, info in model.model_fields.items()}
        if one.KEY is not None:
            fields["idempotency_key"] = (tool_arguments.Key, None)
        text = (one.__doc__ or "").split("\n\n")[0].replace("the caller's", "your").replace("the caller", "you")
        found[one.TOOL] = create_model(to_camel(one.TOOL), __base__=ToolArguments, __doc__=text, **fields)
    return found


def declared_tools(hub: Hub, operations: Iterable[type[Operation]]) -> dict[str, PlannedTool]:
    """Return the tools that follow from operations, by their names."""
    return {
        one.TOOL: type(one.__name__, (DeclaredTool, one), {"route": one.TOOL})(hub)
        for one in operations
        if one.TOOL is not None
    }


def _in_camel_case(document: Any, schema: dict[str, Any], models: dict[str, Any]) -> Any:
    """Return a document with the names of its fields in camel case. The keys of a mapping stay."""
    for one in schema.get("anyOf", ()):
        schema = one if one.get("type") != "null" else schema
    if "$ref" in schema:
        schema = models[schema["$ref"].rpartition("/")[2]]
    if isinstance(document, list):
        return [_in_camel_case(one, schema.get("items", {}), models) for one in document]
    fields = schema.get("properties")
    if not isinstance(document, dict) or fields is None:
        return document
    return {to_camel(name): _in_camel_case(one, fields.get(name, {}), models) for name, one in document.items()}


_DECLARED: Final = declared_arguments(OPERATIONS)
_READING: Final = frozenset(one.TOOL for one in OPERATIONS if one.TOOL is not None and one.METHOD == _GET)
ARGUMENTS: Final = {**tool_arguments.ARGUMENTS, **_DECLARED}
# All other tools change something, so each of their calls needs a signature of its own.
ONLY_READS: Final = tool_arguments.ONLY_READS | _READING
TOOLS: Final = [
    *tool_arguments.TOOLS,
    *described_tools(_DECLARED, only_reads=_READING, idempotent=()),
]
