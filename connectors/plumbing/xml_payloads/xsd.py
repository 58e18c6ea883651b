"""XSD, example and tool description, generated from the fields of a payload class (XP-01)."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from connectors.plumbing.xml_payloads.shapes import Leaf, Record, Slot

_INDENT = "  "


def derived_xsd(root_tag: str, namespace: str, record: Record) -> str:
    """Return the text of the XSD of a payload class: one element for each field, in the order of the fields.

    The XSD allows no attributes and no other content. `record` describes the fields of the class, as
    `record_of` returns it.
    """
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<xs:schema xmlns:xs="http://www.w3.org/2001/XMLSchema"',
        f'           targetNamespace={quoteattr(namespace)} elementFormDefault="qualified">',
        f'{_INDENT}<xs:element name="{root_tag}">',
        *_complex_type(record, 2),
        f"{_INDENT}</xs:element>",
        "</xs:schema>",
    ]
    return "\n".join(lines) + "\n"


def _complex_type(record: Record, level: int) -> list[str]:
    indent = _INDENT * level
    lines = [f"{indent}<xs:complexType>", f"{indent}{_INDENT}<xs:sequence>"]
    for slot in record.slots:
        lines += _element(slot, level + 2)
    return [*lines, f"{indent}{_INDENT}</xs:sequence>", f"{indent}</xs:complexType>"]


def _element(slot: Slot, level: int) -> list[str]:
    indent = _INDENT * level
    occurs = "" if slot.is_required else ' minOccurs="0"'
    if slot.is_list:
        occurs += ' maxOccurs="unbounded"'
    head = f'{indent}<xs:element name="{slot.name}"{occurs}'
    if isinstance(slot.shape, Record):
        return [f"{head}>", *_complex_type(slot.shape, level + 1), f"{indent}</xs:element>"]
    leaf = slot.shape
    facets = [f'<xs:pattern value="{escape(pattern)}"/>' for pattern in leaf.patterns]
    facets += [f"<xs:enumeration value={quoteattr(choice)}/>" for choice in leaf.choices]
    if not facets:
        return [f'{head} type="{leaf.xsd_type}"/>']
    return [
        f"{head}>",
        f"{indent}{_INDENT}<xs:simpleType>",
        f'{indent}{_INDENT * 2}<xs:restriction base="{leaf.xsd_type}">',
        *(f"{indent}{_INDENT * 3}{facet}" for facet in facets),
        f"{indent}{_INDENT * 2}</xs:restriction>",
        f"{indent}{_INDENT}</xs:simpleType>",
        f"{indent}</xs:element>",
    ]


def derived_example(root_tag: str, namespace: str, record: Record) -> bytes:
    """Return an example payload as XML bytes that the XSD accepts. It has each field once.

    Each field has its default value, or else a sample value of its type. `record` describes the fields of the
    class, as `record_of` returns it.
    """
    declared = f" xmlns={quoteattr(namespace)}"
    return f"<{root_tag}{declared}>{_example_content(record)}</{root_tag}>".encode()


def _example_content(record: Record) -> str:
    return "".join(f"<{slot.name}>{_example_value(slot)}</{slot.name}>" for slot in record.slots)


def _example_value(slot: Slot) -> str:
    if isinstance(slot.shape, Record):
        return _example_content(slot.shape)
    if not slot.is_list and slot.default not in (dataclasses.MISSING, None):
        try:
            return slot.shape.write(slot.default)
        except ValueError:
            pass  # use the sample for a default that cannot be written
    return slot.shape.write(slot.shape.sample)


def derived_tool_description(root_tag: str, record: Record) -> dict[str, Any]:
    """Return the payload class as a tool for a language model: name, description and JSON schema.

    The keys are `name` (the root tag), `description` (the docstring of the class, empty if it has none) and
    `input_schema`. `record` describes the fields of the class, as `record_of` returns it.
    """
    text = inspect.cleandoc(record.cls.__doc__ or "")
    # A class without a docstring gets one from dataclasses: its signature.
    is_generated = text.startswith(f"{record.cls.__name__}(")
    return {
        "name": root_tag,
        "description": "" if is_generated else text,
        "input_schema": _object_schema(record),
    }


def _object_schema(record: Record) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {slot.name: _slot_schema(slot) for slot in record.slots},
        "required": [slot.name for slot in record.slots if slot.is_required],
        "additionalProperties": False,
    }


def _slot_schema(slot: Slot) -> dict[str, Any]:
    item = dict(slot.shape.json_schema) if isinstance(slot.shape, Leaf) else _object_schema(slot.shape)
    found: dict[str, Any] = {"type": "array", "items": item} if slot.is_list else item
    if slot.description:
        found["description"] = slot.description
    # Only types that JSON can represent exactly: no Enum, no NaN.
    if type(slot.default) in (str, int, bool):
        found["default"] = slot.default
    return found
