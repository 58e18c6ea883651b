"""The base classes of request and answer bodies, and the types and bodies that all routes share.

The OpenAPI page shows these models. The docstring below a field is its description there. A request with an
unknown field is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from schemas.tables.arrow_tables import column_texts
from schemas.wire.wire_body import OVERLAP_LIMIT_MS, Name
from trunkline_agent.wire.ids import NAME_LIMIT

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
NAMED: Final[dict[str, Any]] = {"pattern": NAME_PATTERN, "max_length": NAME_LIMIT}
"""The arguments of a parameter that is a name."""
JOB_ID_PATTERN: Final = r"^[0-9a-f]{8}$"
DIGEST_PATTERN: Final = r"^[0-9a-f]{64}$"
LIST_LIMIT: Final = 1000
OVERLAP_LIMIT_S: Final = OVERLAP_LIMIT_MS // 1000
NamedThing = Annotated[Name, Field(json_schema_extra={"maxLength": NAME_LIMIT})]
"""A name."""
ListLimit = Annotated[int, Field(ge=1, le=LIST_LIMIT)]
"""The largest number of items in an answer."""
# The same pattern as in schemas, with `$` at its end, which every reader of an OpenAPI page understands.
JobId = Annotated[str, Field(pattern=JOB_ID_PATTERN)]
"""The id of a job."""
BlobDigest = Annotated[str, Field(pattern=DIGEST_PATTERN)]
"""The SHA-256 of a blob's content, in hex."""


class RequestBody(BaseModel):
    """The base class of request bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class AnswerBody(BaseModel):
    """The base class of answer bodies."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class QueryFilter(BaseModel):
    """The base class of query parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PageFilter(QueryFilter):
    """The place at which a list that is sorted by name goes on."""

    after: NamedThing | None = None
    """Last name of the previous answer. Without it, the list starts at its first."""


class PageAnswer(AnswerBody):
    """A part of a list that is sorted by name."""

    left: int
    """Number of further items, which do not fit into the answer. For them, ask again with `after`."""


def _whole(number: object) -> object:
    return int(number) if isinstance(number, float) and number.is_integer() else number


# JSON Schema counts 1883.0 as an integer, so the gateway does, too.
WHOLE: Final = BeforeValidator(_whole)


class NoFields(RequestBody):
    """An empty JSON object."""


class ErrorAnswer(AnswerBody):
    """An error."""

    reason: str
    """Stable code of the error."""
    message: str
    """Explanation for people."""


ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request was refused; `reason` is the code."},
    "5XX": {"model": ErrorAnswer, "description": "The gateway failed; 503 has a `Retry-After` header."},
}


class HealthAnswer(AnswerBody):
    """The health of the gateway."""

    status: Literal["ok", "ready"]
    """`ok`: the gateway answers. `ready`: it can do its work."""


class ReadyAnswer(HealthAnswer):
    """The gateway can do its work."""

    lag: dict[str, int]
    """Number of records behind the end of the log, by partition."""


def row_answer(name: str, row_type: type[msgspec.Struct]) -> type[BaseModel]:
    """Return the model of an answer with the columns of a view row, and their texts as descriptions.

    Args:
        name: The name of the model.
        row_type: The class of the row. Its times become ISO 8601, as in `row_as_json`.
    """
    fields: dict[str, Any] = {}
    texts = column_texts(row_type)
    for field in msgspec.structs.fields(row_type):
        kind = field.type
        if field.name.endswith("_at") and kind is not str and kind != (str | None):
            is_optional = type(None) in getattr(kind, "__args__", ())
            kind = AwareDatetime | None if is_optional else AwareDatetime
        fields[field.name] = (kind, Field(description=texts[field.name]))
    doc = f"The columns of a registry row ({name})."
    # All fields have texts. To look for docstrings, too, Pydantic would search all modules for each caller.
    return create_model(name, __config__=ConfigDict(extra="forbid"), __doc__=doc, **fields)
