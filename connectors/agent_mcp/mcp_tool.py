"""Building blocks of our MCP servers: a tool as `tools/list` describes it, its arguments, and its results."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from mcp import types
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel, to_snake


class ToolArguments(BaseModel):
    """The arguments of a tool: names in camel case, no unknown names, no values of another type.

    The name of a subclass is the name of its tool in camel case. Its docstring describes the tool to the
    clients, as the text of `tools/list`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


def tools_by_name(*models: type[ToolArguments]) -> dict[str, type[ToolArguments]]:
    """Return the arguments of tools by the names of the tools."""
    return {to_snake(model.__name__): model for model in models}


def described_tools(
    arguments: Mapping[str, type[ToolArguments]],
    *,
    only_reads: Container[str],
    idempotent: Container[str],
    destroys: Container[str] = (),
) -> list[types.Tool]:
    """Return tools as `tools/list` shows them, with the JSON schemas of their arguments.

    The last three arguments name the tools with these hints. No tool of ours reaches beyond the backbone, so
    `open_world_hint` is always false.
    """
    found = []
    for name, model in arguments.items():
        schema = model.model_json_schema(by_alias=True)
        hints = types.ToolAnnotations(
            read_only_hint=name in only_reads,
            destructive_hint=name in destroys,
            idempotent_hint=name in idempotent,
            open_world_hint=False,
        )
        del schema["title"]
        description = " ".join(schema.pop("description").split())
        found.append(types.Tool(name=name, description=description, input_schema=schema, annotations=hints))
    return found


def tool_result(answer: dict[str, Any]) -> types.CallToolResult:
    """Return the result of a call, as structured content and as text for clients that read only text."""
    text = types.TextContent(type="text", text=json.dumps(answer, ensure_ascii=False))
    return types.CallToolResult(content=[text], structured_content=answer)


def tool_error(reason: str, message: str) -> types.CallToolResult:
    """Return the result of a call that failed."""
    text = types.TextContent(type="text", text=f"{reason}: {message}")
    said = {"reason": reason, "message": message}
    return types.CallToolResult(content=[text], structured_content=said, is_error=True)
