"""Building blocks of our MCP servers: a tool as `tools/list` describes it, its arguments, and its results."""

from __future__ import annotations

import json
from typing import Any

from mcp import types
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ToolArguments(BaseModel):
    """The arguments of a tool: names in camel case, no unknown names, no values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


def tool_of(
    name: str,
    arguments: type[ToolArguments],
    description: str,
    *,
    only_reads: bool = False,
    destroys: bool = False,
    is_idempotent: bool = False,
) -> types.Tool:
    """Return the description of a tool with the JSON schema of its arguments.

    No tool of ours reaches beyond the backbone, so `open_world_hint` is always false.
    """
    schema = arguments.model_json_schema(by_alias=True)
    return types.Tool(
        name=name,
        description=description,
        input_schema={key: value for key, value in schema.items() if key not in ("title", "description")},
        annotations=types.ToolAnnotations(
            read_only_hint=only_reads,
            destructive_hint=destroys,
            idempotent_hint=is_idempotent,
            open_world_hint=False,
        ),
    )


def tool_result(answer: dict[str, Any]) -> types.CallToolResult:
    """Return the result of a call, as structured content and as text for clients that read only text."""
    text = types.TextContent(type="text", text=json.dumps(answer, ensure_ascii=False))
    return types.CallToolResult(content=[text], structured_content=answer)


def tool_error(reason: str, message: str) -> types.CallToolResult:
    """Return the result of a call that failed."""
    text = types.TextContent(type="text", text=f"{reason}: {message}")
    said = {"reason": reason, "message": message}
    return types.CallToolResult(content=[text], structured_content=said, is_error=True)
