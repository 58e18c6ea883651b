"""Arguments of tools that are fields of the hub's operations: they follow the operation's model."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field

from connectors.doors.mcp_tools.agents import tool_arguments
from connectors.doors.mcp_tools.agents.mcp_tool import ToolArguments, described_tools, tools_by_name
from connectors.hub.serving.models import NamedThing, RequestBody
from schemas.wire.wire_body import NAME_PATTERN


class _Body(RequestBody):
    topic: NamedThing
    limit: Annotated[int, Field(ge=1, le=7)] = 5
    thread: NamedThing | None = None


@pytest.mark.requirement("AM-04")
def test_an_argument_has_the_type_bounds_and_default_of_the_operations_field() -> None:
    @tool_arguments._takes(_Body, "limit", "thread", "payload", payload="Another text.")
    class SomeTool(ToolArguments):
        """Do something."""

    (tool,) = described_tools(tools_by_name(SomeTool), only_reads=(), idempotent=())
    assert (tool.name, tool.description) == ("some_tool", "Do something.")
    shown = tool.input_schema["properties"]
    about = {"default": 5, "description": "How many at most.", "title": "Limit", "type": "integer"}
    assert shown["limit"] == {**about, "minimum": 1, "maximum": 7}
    # The pattern of a name bounds its length.
    assert shown["thread"]["anyOf"] == [{"pattern": NAME_PATTERN, "type": "string"}, {"type": "null"}]
    # This argument has a name and a type of its own.
    assert (shown["message"]["description"], shown["message"]["minLength"]) == ("Another text.", 1)
    assert tool.input_schema["required"] == ["message"]
    assert SomeTool.model_validate({"message": "x"}).payload == "x"
