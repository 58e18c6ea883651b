"""Faults of requests in words: a text is measured in characters."""

from __future__ import annotations

from typing import Annotated

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError

from connectors.hub.serving import answers
from schemas.streams.job.job_registry import DESCRIPTION_LIMIT, JobRegistration
from schemas.wire.wire_body import Note, Printable, first_fault


class Request(BaseModel):
    """A request with texts and a list."""

    note: Note = ""
    title: Annotated[Printable, Field(min_length=2)] = "ok"
    names: Annotated[list[str], Field(max_length=2)] = []


@pytest.mark.requirement("OP-42")
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"note": "x" * 501}, "note: Value should have at most 500 characters, not 501"),
        ({"title": "x"}, "title: Value should have at least 2 characters, not 1"),
        ({"names": ["x"] * 3}, "names: List should have at most 2 items, not 3"),
    ],
    ids=["long", "short", "list"],
)
def test_the_length_of_a_text_is_told_in_characters(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Request.model_validate(fields)
    assert first_fault(caught.value) == said
    assert answers.first_fault(RequestValidationError(caught.value.errors())) == said


@pytest.mark.requirement("OP-42")
def test_a_description_that_is_too_long_is_told_in_characters() -> None:
    with pytest.raises(ValidationError) as caught:
        JobRegistration(job_id="0a1b2c3d", description="x" * 4001, sealed_secret="s")
    assert f"at most {DESCRIPTION_LIMIT} characters, not 4001" in first_fault(caught.value)


def test_a_strange_key_of_the_client_is_not_repeated_in_the_place_of_a_fault() -> None:
    fault = {
        "type": "value_error",
        "loc": ("body", "wants", "/E\x06" * 99, "[key]"),
        "msg": "Value error, not a name",
    }
    assert answers.first_fault(RequestValidationError([fault])).startswith("body.wants.?.[key]: ")
