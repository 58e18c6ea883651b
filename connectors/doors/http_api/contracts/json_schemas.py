"""The JSON Schemas of the records in the log, made from the models of their bodies (JSON Schema 2020-12).

The schemas use no keyword that draft 7 reads differently, because AsyncAPI documents contain draft 7. Their
patterns are valid in ECMA 262, which JSON Schema prescribes, and in Python. A schema accepts each body that the
fold's check of the form accepts. It accepts some more, because rules between fields cannot be expressed.
"""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from schemas.fold.stream_kind import StreamKind
from schemas.streams.kinds import KINDS

Schema = dict[str, Any]
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
VERSION: Final = "schema_version"
_URN: Final = "urn:trunkline:schema:"
_ATTRIBUTES: Final = "\n\nAttributes:\n"
# One attribute of a docstring: its name, and its text with the indented lines that continue it.
_ATTRIBUTE: Final = re.compile(r"^    (\w+): (.+(?:\n        .+)*)", re.MULTILINE)
_WORDS: Final = {"`None`": "`null`", "`True`": "`true`", "`False`": "`false`"}


class PortableSchema(GenerateJsonSchema):
    """Pydantic's generator, with portable patterns, texts from docstrings, and no titles of fields."""

    def str_schema(self, schema: Any) -> Schema:
        """Return the schema of a text. Its pattern ends with a dollar sign, as JSON Schema wants it."""
        found = super().str_schema(schema)
        if "pattern" in found:
            found["pattern"] = found["pattern"].replace(r"\z", "$")
        return found

    def model_schema(self, schema: Any) -> Schema:
        """Return the schema of a model. Fields get the texts that its docstring has for them."""
        found = super().model_schema(schema)
        text, _, attributes = found.get("description", "").partition(_ATTRIBUTES)
        found["description"] = paragraphs(text)
        fields, properties = schema["cls"].model_fields, found.get("properties", {})
        for name, about in _ATTRIBUTE.findall(attributes):
            alias = fields[name].alias or name
            properties[alias].setdefault("description", _sentence(about))
        return found

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: a title repeats the name of the field."""
        return False


def record_schema(record_type: str) -> Schema:
    """Return the JSON Schema of the body of a record type, such as `job.event`.

    The version must be there, except in bodies that other programs make (`StreamKind.foreign_types`).

    Raises:
        KeyError: there is no such record type.
    """
    kind = kind_of(record_type)
    found = kind.models[record_type].model_json_schema(schema_generator=PortableSchema)
    if record_type not in kind.foreign_types:
        found["properties"][VERSION].pop("default", None)
        found["required"] = [VERSION, *(name for name in found.get("required", ()) if name != VERSION)]
    return document(record_type, found)


def kind_of(record_type: str) -> StreamKind:
    """Return the kind of stream that a record type belongs to. Raises KeyError for an unknown type."""
    for kind in KINDS.values():
        if record_type in kind.models:
            return kind
    raise KeyError(record_type)


def document(name: str, schema: Schema) -> Schema:
    """Return a schema as a document of its own, with its dialect and its id."""
    return {**schema, "$schema": DIALECT, "$id": f"{_URN}{name}"}


def paragraphs(text: str) -> str:
    """Return a docstring as paragraphs of one line each, in the words of JSON."""
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text.strip())
    return re.sub("|".join(_WORDS), lambda found: _WORDS[found[0]], text)


def _sentence(text: str) -> str:
    words = " ".join(paragraphs(text).split())
    return words[0].upper() + words[1:]
