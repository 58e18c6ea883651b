"""The base class of the bodies of Trunkline's own records: pydantic models that are strict and versioned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Unpack

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from schemas.wire.record import Origin, OutgoingRecord
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.job_event import has_control_characters
from trunkline_agent.wire.moments import is_utc_timestamp
from trunkline_agent.wire.strict_json import INT_MAX, canonical

# The checks below as regular expressions, for readers of the JSON schema.
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_LENGTHS: Final = frozenset({"too_long", "too_short"})
# Pydantic's name for a text that an AfterValidator has checked.
_TEXT: Final = "Value"
_PRINTABLE: Final = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$"
_UTC_TIME: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?Z$"


IMAGE_LIMIT: Final = 255
CAPABILITIES_LIMIT: Final = 64
# In characters. The agent gets the text as one environment variable, which Linux limits to 128 KiB.
TASK_TEXT_LIMIT: Final = 32_000
OVERLAP_LIMIT_MS: Final = 30 * 24 * 3600 * 1000
# The part of an identity that is the whole content.
_CONTENT: Final = "{content}"


class _Form:
    """A check of a text by a pattern, with words of its own. pydantic makes it without calling Python."""

    def __init__(self, pattern: str, words: str) -> None:
        self._pattern = pattern
        self._words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        form = core_schema.str_schema(pattern=self._pattern)
        told = core_schema.custom_error_schema(form, "value_error", custom_error_context={"error": self._words})
        return core_schema.chain_schema([handler(source), told])


def _printable(text: str) -> str:
    if has_control_characters(text.replace("\n", "").replace("\t", "")):
        raise ValueError("holds a control character")
    return text


def _utc_time(text: str) -> str:
    if not is_utc_timestamp(text):
        raise ValueError("not an ISO 8601 time in UTC such as 2026-11-21T10:00:00Z")
    return text


UtcTime = Annotated[
    str, AfterValidator(_utc_time), Field(json_schema_extra={"format": "date-time", "pattern": _UTC_TIME})
]
"""A time in ISO 8601 in UTC, with seconds and `Z`."""
Name = Annotated[
    str,
    _Form(
        NAME_PATTERN,
        "not a name: letters, digits, '.', '_', '-', at most 128, first a letter or digit",
    ),
    Field(json_schema_extra={"pattern": NAME_PATTERN}),
]
"""A name by CM-01."""
JobId = Annotated[str, Field(pattern=r"^[0-9a-f]{8}\z")]
"""8 lower-case hex digits."""
Printable = Annotated[str, AfterValidator(_printable), Field(json_schema_extra={"pattern": _PRINTABLE})]
"""Text without control characters other than newline and tab."""
Most = Annotated[int, Field(ge=0, le=INT_MAX)]
"""A limit of a number of things, 0 for none of them."""
NOTE_LIMIT: Final = 500
Note = Annotated[Printable, Field(max_length=NOTE_LIMIT)]
"""A short remark by a person or a program."""


def _unique(names: list[str]) -> list[str]:
    if len(set(names)) != len(names):
        raise ValueError("holds a name twice")
    return names


Capabilities = Annotated[
    list[Name],
    Field(max_length=CAPABILITIES_LIMIT, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_unique),
]
"""Names of what an agent can do, each at most once."""


Image = Annotated[Printable, Field(min_length=1, max_length=IMAGE_LIMIT)]
"""The image that a launcher runs."""


class WireBody(BaseModel):
    """The body of a record that only Trunkline's own doors make. Unknown keys are rejected.

    Attributes:
        OMITS_NULLS: whether the record omits the fields that are `None`. A field that is added later then does
            not change the content of a repeated request.
        TYPE: the type of its record, the header `ce_type`.
        STREAM: the key of its stream, such as `job/{job_id}`, with fields of the body in braces, or `{door}`.
        IDENTITY: the texts from which the record's `ce_id` is derived, after the type. In braces are fields of
            the body, `{origin}` for door and principal, and `{cause}`. The text `{content}` stands for the
            whole body. A repeated request of the same principal has the same `ce_id`, even with other content
            if that is not among them. The fold then recognises the conflict.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    # `Literal[1]` also accepts `true`, but the fold has checked the version before.
    schema_version: Literal[1] = 1
    OMITS_NULLS: ClassVar[bool] = False
    TYPE: ClassVar[str]
    STREAM: ClassVar[str]
    IDENTITY: ClassVar[tuple[str, ...]] = (_CONTENT,)

    def value(self) -> bytes:
        """Return the body as canonical JSON, which becomes the value of the Kafka record."""
        return canonical(self.model_dump(mode="json", by_alias=True, exclude_none=self.OMITS_NULLS))

    def record(self, *, ce_id: str | None = None, cause: str = "", **origin: Unpack[Origin]) -> OutgoingRecord:
        """Return a record with this body, ready to append. Nothing is appended yet.

        Args:
            ce_id: a CloudEvents id to use instead of the derived one, as the reactor does. `None` means that.
            cause: what tells the record from an equal one before it, for a body whose `IDENTITY` has it.
            origin: `door`, which appends the record, and `principal`, which caused it.
        """
        value, sender = self.value(), f"{origin['door']}/{origin['principal']}"
        known = {**vars(self), "door": origin["door"], "origin": sender, "cause": cause}
        return OutgoingRecord(
            stream=self.STREAM.format_map(known),
            ce_id=ce_id or self.derived_id(value, known),
            type=self.TYPE,
            value=value,
            **origin,
        )

    def derived_id(self, content: bytes, known: Mapping[str, Any]) -> str:
        """Return the CloudEvents id of a record with this body, by `IDENTITY`.

        `content` is the value of the record. `known` has the fields of the body, and the other names in braces.
        """
        parts = [content if one == _CONTENT else one.format_map(known).encode() for one in self.IDENTITY]
        return content_id(self.TYPE.encode(), *parts)


def models_of(*bodies: type[WireBody]) -> dict[str, type[WireBody]]:
    """Return these bodies by the types of their records."""
    return {body.TYPE: body for body in bodies}


def body_fault(model: type[BaseModel], body: dict[str, Any]) -> str | None:
    """Validate a decoded body against the model of its record type.

    Returns:
        The first fault as `field: reason`, without quoting the input, or None if the body is valid.
    """
    try:
        model.model_validate(body)
    except ValidationError as error:
        return first_fault(error)
    return None


def first_fault(error: ValidationError) -> str:
    """Return the first fault of a validation error as `field: reason`.

    The text does not quote the input, which may be secret.
    """
    first = error.errors(include_input=False, include_url=False)[0]
    # The last part of an unknown key's location is the key itself, which is input.
    place = first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"]
    return f"{'.'.join(str(part) for part in place) or 'body'}: {words_of(first)}"


def words_of(fault: Mapping[str, Any]) -> str:
    """Return pydantic's message for one fault of a validation error, corrected for the length of texts.

    Pydantic counts the length of some texts in "items". The result says "characters".

    Args:
        fault: one element of `ValidationError.errors()`.
    """
    words = str(fault["msg"])
    if fault["type"] not in _LENGTHS:
        return words
    is_text = fault.get("ctx", {}).get("field_type") == _TEXT
    words = words.replace(" after validation", "")
    return words.replace(" items", " characters").replace(" item,", " character,") if is_text else words
