"""Tools that follow from the declarations of operations: their arguments, results and rights (AM-04)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from connectors.doors.mcp_tools.agents.mcp_tool import described_tools
from connectors.doors.mcp_tools.agents.operation_tools import declared_arguments, declared_tools
from connectors.hub.engine.family import Family, LongAnswer
from connectors.hub.serving.models import AnswerBody, PageFilter, RequestBody
from connectors.hub.serving.policy import Action
from connectors.operations.topics.topic_operations import TopicPath
from schemas.streams.mailboxes.mailbox_bodies import MailboxClearing
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub

pytestmark = pytest.mark.requirement("AM-04")


class PlaceAnswer(AnswerBody):
    """A place."""

    place_name: str
    """Name of the place."""
    seen_by: dict[str, int]
    """Numbers of looks, by agent."""


class PlacesAnswer(AnswerBody):
    """Places."""

    all_places: list[PlaceAnswer]
    """Places."""


class MoveRequest(RequestBody):
    """A move."""

    new_place: str
    """Name of the place."""
    step_count: int = 1
    """Number of steps."""


PLACES = Family("/api/hub/places", lambda hub, name: {"place_name": name, "seen_by": {}}, "recipient")
ROW = {"place_name": "here", "seen_by": {"not_a_field": 3}}


@PLACES.get("/{topic}", Action.TOPIC_READ, PlacesAnswer, TOOL="list_places")
def list_places(hub: Any, asked: Any, topic: TopicPath, wanted: PageFilter) -> Any:
    """Show the places of the caller's topic.

    More for readers of the document.
    """
    row = {**ROW, "place_name": f"{topic}/{wanted.after}"}
    return LongAnswer(10**9 if topic == "long" else 1, lambda: {"all_places": [row]})


@PLACES.post("/{topic}/move", Action.MESSAGE_MARK, PlaceAnswer, TOOL="move_place")
def move_place(hub: Any, asked: Any, topic: TopicPath, body: MoveRequest) -> MailboxClearing:
    """Move."""
    assert body.model_dump() == {"new_place": "there", "step_count": 2} and topic == "t"
    return MailboxClearing(realm="default", to=asked.principal, request_id=asked.request_id)


def called(name: str, **arguments: Any) -> dict[str, Any]:
    hub: Any = FoldedHub()

    async def call() -> dict[str, Any]:
        asked = declared_arguments(PLACES.operations)[name].model_validate(arguments)
        return await declared_tools(hub, PLACES.operations)[name].serve("bo", asked)

    return asyncio.run(call())


def test_a_declared_tool_has_path_query_body_and_key_as_arguments_in_camel_case() -> None:
    reads, moves = described_tools(
        declared_arguments(PLACES.operations), only_reads={"list_places"}, idempotent=()
    )
    assert (reads.name, reads.description) == ("list_places", "Show the places of your topic.")
    assert list(reads.input_schema["properties"]) == ["topic", "after"]
    assert reads.input_schema["required"] == ["topic"] and reads.annotations.read_only_hint
    assert moves.input_schema["required"] == ["topic", "newPlace"] and not moves.annotations.read_only_hint
    fields = moves.input_schema["properties"]
    assert list(fields) == ["topic", "newPlace", "stepCount", "idempotencyKey"]
    assert (fields["stepCount"]["default"], fields["stepCount"]["description"]) == (1, "Number of steps.")
    model = declared_arguments(PLACES.operations)["list_places"]
    for wrong in ({"topic": "a b"}, {"topic": "t", "after": ""}, {"topic": "t", "place": 1}, {}):
        with pytest.raises(ValidationError):
            model.model_validate(wrong)


@pytest.mark.parametrize("topic", ["t", "long"])
def test_the_result_of_a_declared_tool_has_camel_case_fields_and_keys_of_mappings_as_they_are(
    topic: str,
) -> None:
    row = {"placeName": f"{topic}/x", "seenBy": {"not_a_field": 3}}
    assert called("list_places", topic=topic, after="x") == {"allPlaces": [row]}


def test_a_declared_tool_that_changes_something_gets_its_own_body_and_shows_the_thing() -> None:
    done = called("move_place", topic="t", newPlace="there", stepCount=2, idempotencyKey="k")
    assert done == {"placeName": "bo", "seenBy": {}}


def test_an_operation_to_which_agents_have_no_right_cannot_be_a_tool() -> None:
    family = Family("/api/hub/places")

    @family.get("", Action.MAILBOX_READ, PlacesAnswer, TOOL="all_places")
    def all_places(hub: Any, asked: Any) -> Any:
        """Show all."""

    with pytest.raises(ValueError, match=r"all_places: an agent has no right to mailbox.read"):
        declared_arguments(family.operations)
