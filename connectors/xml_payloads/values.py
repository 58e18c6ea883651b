"""Payload values to XML and back. The XML is canonical, and valid by the derived schema."""

from __future__ import annotations

import dataclasses
from typing import Any
from xml.sax.saxutils import escape

from connectors.terminal.terminal_text import escaped
from connectors.xml_payloads.shapes import Record, Slot
from connectors.xml_wire.faults import Faulty, quoted


def written_payload(root_tag: str, namespace: str, record: Record, value: Any) -> bytes:
    """Return the canonical form of `value`. Raises ValueError, with the field, for one that XML cannot hold."""
    declared = escape(namespace, {'"': "&quot;"})
    content = _written(record, value, record.cls.__name__)
    return f'<{root_tag} xmlns="{declared}">{content}</{root_tag}>'.encode()


def _written(record: Record, value: Any, where: str) -> str:
    if type(value) is not record.cls:
        raise ValueError(f"{where}: it is of the type {type(value).__name__}, not {record.cls.__name__}")
    parts = []
    for slot in record.slots:
        inner = f"{where}.{slot.name}"
        held = getattr(value, slot.name)
        if held is None and slot.is_optional:
            continue
        if not slot.is_list:
            held = [held]
        elif not isinstance(held, list):
            raise ValueError(f"{inner}: it is of the type {type(held).__name__}, not a list")
        parts += [f"<{slot.name}>{_written_item(slot, item, inner)}</{slot.name}>" for item in held]
    return "".join(parts)


def _written_item(slot: Slot, item: Any, where: str) -> str:
    if isinstance(slot.shape, Record):
        return _written(slot.shape, item, where)
    try:
        return slot.shape.write(item)
    except ValueError as error:
        raise ValueError(f"{where}: {error}, not {slot.shape.what}") from None


def read_record(record: Record, element: Any) -> Any:
    """Return the value of an element, whether or not a schema has checked it. Raises Faulty("value")."""
    values: dict[str, Any] = {}
    by_tag = record.by_tag
    for child in element:
        slot = by_tag.get(child.tag)
        if slot is None:
            raise Faulty("value", f"there is no field for the element {quoted(str(child.tag))}")
        value = _read_item(slot, child)
        if slot.is_list:
            values.setdefault(slot.name, []).append(value)
        elif slot.name in values:
            raise Faulty("value", f"<{slot.name}> occurs twice")
        else:
            values[slot.name] = value
    if len(values) < len(record.slots):
        _fill(record, values)
    try:
        return record.cls(**values)
    except Exception as error:  # noqa: BLE001  the class's __post_init__ may raise any error
        raise Faulty("value", f"{record.cls.__name__}: {escaped(str(error))[:200]}") from None


def _read_item(slot: Slot, child: Any) -> Any:
    shape = slot.shape
    if isinstance(shape, Record):
        return read_record(shape, child)
    if len(child):
        raise Faulty("value", f"<{slot.name}> holds only text, but there is an element in it")
    try:
        return shape.read(child.text or "")
    except ValueError:
        raise Faulty("value", f"<{slot.name}> must be {shape.what}") from None


def _fill(record: Record, values: dict[str, Any]) -> None:
    """Add the fields that were left out: an empty list, None, or the class's own default."""
    for slot in record.slots:
        if slot.name in values:
            continue
        if slot.is_list:
            values[slot.name] = []
        elif slot.is_optional:
            values[slot.name] = None
        elif slot.default is dataclasses.MISSING:
            raise Faulty("value", f"<{slot.name}> is missing")
