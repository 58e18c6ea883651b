"""Building blocks of the two MCP servers: tools, their arguments, and results and progress of calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Container, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from mcp import types
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel, to_snake

from schemas.wire.wire_body import NAME_PATTERN

_text: Final = json.JSONEncoder(ensure_ascii=False).encode
PROGRESS_S: Final = 15.0
"""The seconds between two signs of life of a call that waits. Hosts give up after 60 s without one."""


class ToolArguments(BaseModel):
    """The base class of tool arguments: names in camel case, no unknown names, no conversion of types.

    The name of a subclass is the name of its tool in camel case. Its docstring describes the tool to the
    clients, as the text of `tools/list`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


def tools_by_name(*models: type[ToolArguments]) -> dict[str, type[ToolArguments]]:
    """Return the argument models of tools by the name of the tool, such as `SendToAgent` by `send_to_agent`.

    The name is that of the class in snake case.
    """
    return {to_snake(model.__name__): model for model in models}


def described_tools(
    arguments: Mapping[str, type[ToolArguments]],
    *,
    only_reads: Container[str],
    idempotent: Container[str],
    destroys: Container[str] = (),
) -> list[types.Tool]:
    """Return the descriptions of tools for `tools/list`, with the JSON schemas of their arguments.

    No tool of ours reaches beyond the backbone, so `openWorldHint` is always false.

    Args:
        arguments: The model of each tool's arguments, by the tool's name.
        only_reads: The names of tools that change nothing (`readOnlyHint`).
        idempotent: The names of tools that have no further effect when repeated (`idempotentHint`).
        destroys: The names of tools that end or delete something (`destructiveHint`).
    """
    found = []
    for name, model in arguments.items():
        schema = _without_length_of_names(model.model_json_schema(by_alias=True))
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


def _without_length_of_names(schema: Any) -> Any:
    """Return a JSON schema in which only the pattern bounds a name, and no length beside it."""
    if isinstance(schema, list):
        return [_without_length_of_names(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = {"maxLength"} if schema.get("pattern") == NAME_PATTERN else set()
    return {name: _without_length_of_names(schema[name]) for name in schema if name not in left_out}


def result_text(answer: dict[str, Any]) -> str:
    """Return the JSON text of a result, for clients that do not read structured content."""
    return _text(answer)


def tool_result(answer: dict[str, Any]) -> types.CallToolResult:
    """Return the MCP result of a successful call, with `answer` as structured content and as JSON text."""
    text = types.TextContent(type="text", text=result_text(answer))
    return types.CallToolResult(content=[text], structured_content=answer)


def tool_error(reason: str, message: str, retry_after_s: int | None = None) -> types.CallToolResult:
    """Return the MCP result of a failed call, with `reason` and `message` as structured content and as text.

    `reason` is a code such as `malformed`, and `message` explains the failure to people. A call that a limit
    refused may succeed after `retry_after_s` seconds, which is the field `retryAfterSeconds` of the content.
    """
    said: dict[str, Any] = {"reason": reason, "message": message}
    hint = ""
    if retry_after_s is not None:
        said["retryAfterSeconds"], hint = retry_after_s, f"; try again in {retry_after_s} s"
    text = types.TextContent(type="text", text=f"{reason}: {message}{hint}")
    return types.CallToolResult(content=[text], structured_content=said, is_error=True)


@asynccontextmanager
async def reported_progress(context: Any, every_s: float = PROGRESS_S) -> AsyncIterator[None]:
    """Report the progress of a call to its client while the block runs, if the client has given a token for it.

    A client of which each notification resets the time limit waits on (MCP 2025-06-18, "Progress"). The
    progress is the number of seconds so far. An error of the block comes in an ExceptionGroup.
    """

    async def report() -> None:
        begun = anyio.current_time()
        while True:
            await anyio.sleep(every_s)
            await context.session.report_progress(round(anyio.current_time() - begun, 3))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(report)
        yield
        tasks.cancel_scope.cancel()
