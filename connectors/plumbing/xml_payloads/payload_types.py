"""Typed payloads (XP-01): a dataclass from which the XSD, an example and a tool description are derived.

    @payload(namespace="urn:example:calculator:1")
    @dataclass
    class Calculate:
        expression: str
        digits: int = 2

    payload_type_of(Calculate).xsd
    to_xml(Calculate("1 + 2"))

A field is str, int, float, bool, Decimal, datetime, date, an Enum or Literal of texts or integers, another
dataclass, a list of one of these, or one of these `| None`. A field with a default may be left out.
`field(metadata={"description": …})` says to a language model what it is for.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar
from xml.sax.saxutils import escape, quoteattr

from lxml import etree  # type: ignore[import-untyped]

from connectors.plumbing.xml_payloads.shapes import Leaf, Record, Slot, record_of
from connectors.plumbing.xml_wire.documents import Faulty, quoted
from trunkline_agent.private_files import make_first
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.ids import is_name

_INDENT = "  "


def _derived_xsd(root_tag: str, namespace: str, record: Record) -> str:
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


def _derived_example(root_tag: str, namespace: str, record: Record) -> bytes:
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


def _derived_tool_description(root_tag: str, record: Record) -> dict[str, Any]:
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
    """Return an instance of the class that `record` describes, with the values of an XML element's children.

    `element` is an lxml element and need not have been validated. Raises Faulty("value") for an unknown,
    repeated or missing field, for a value of the wrong type, and when the class itself refuses the values.
    """
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


def cached_schema(folder: Path, listener: str, kind: PayloadType) -> Any:
    """Return the compiled XSD of a payload class, and write its text to disk if it has changed (XP-01).

    The file is `<folder>/<listener>/<root tag>/v1.xsd`, with a new version number for each change. It is for
    people and other programs: the schema returned is always that of the class. If the newest file was edited by
    hand, the next call writes a new version.

    Any number of processes may call it at once. Raises ValueError for an invalid listener name, and OSError
    when the file cannot be read or written.
    """
    if not is_name(listener):
        raise ValueError(f"not a name of a listener: {listener!r}")
    versions = folder / listener / kind.root_tag
    versions.mkdir(parents=True, exist_ok=True)
    written = kind.xsd.encode()
    while True:
        newest = max(map(_version, versions.iterdir()), default=0)
        if newest and (versions / f"v{newest}.xsd").read_bytes() == written:
            return kind.compiled()
        # If another process makes this version first, the next round compares with that one.
        make_first(versions / f"v{newest + 1}.xsd", kind.xsd)


def _version(path: Path) -> int:
    found = re.fullmatch(r"v([1-9][0-9]{0,8})\.xsd", path.name)
    return int(found[1]) if found else 0


ATTRIBUTE: Final = "__payload_type__"
_ENVELOPE_NAMESPACE: Final = "urn:trunkline:envelope:1"
# Printable ASCII that needs no escape, with a scheme, because the meaning of a relative URI depends on its
# place.
_NAMESPACE: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$()*+,;=%-]{1,200}").fullmatch
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class PayloadType:
    """A payload class and the documents that are generated from it: XSD, example and tool description.

    Attributes:
        cls: the class that `payload` has decorated.
        shape: the fields of the class, as XML elements.
    """

    cls: type
    root_tag: str
    namespace: str
    xsd: str
    example: bytes
    tool_description: dict[str, Any]
    shape: Record = field(repr=False, compare=False)

    @cached_property
    def qualified_tag(self) -> str:
        """The root tag with its namespace, as lxml writes it: `{namespace}tag`."""
        return f"{{{self.namespace}}}{self.root_tag}"

    @cached_property
    def schema(self) -> Any:
        """The compiled XSD, shared by all callers. Use it only to learn whether an element is valid.

        Its list of errors is shared, too. Call `compiled` for a list of your own.
        """
        return self.compiled()

    def read(self, element: Any) -> Any:
        """Return the instance of the payload class whose fields an lxml element has.

        The root tag is not checked. Raises Faulty("value") for an unknown or missing field and for a value that
        the class cannot have.
        """
        return read_record(self.shape, element)

    def write(self, instance: Any) -> bytes:
        """Return `instance`, which must be of the payload class, as canonical XML bytes.

        Raises ValueError, which names the field, for a value that XML cannot represent.
        """
        content = _written(self.shape, instance, self.cls.__name__)
        return f'<{self.root_tag} xmlns="{escape(self.namespace)}">{content}</{self.root_tag}>'.encode()

    def compiled(self) -> Any:
        """Compile the XSD of the payload class and return a new lxml schema with its own list of errors."""
        return etree.XMLSchema(etree.fromstring(self.xsd.encode()))


def payload(root_tag: str | None = None, namespace: str | None = None) -> Callable[[C], C]:
    """Return a decorator that makes a dataclass a payload class, with XSD, example and tool description.

    The decorator returns the class itself, with an attribute that `payload_type_of` reads.

    Args:
        root_tag: the root tag of the payload; None: the class's name in lower case, its words joined by
            hyphens.
        namespace: the XML namespace of the root tag; None: `urn:trunkline:payload:<root tag>:1`.

    Raises:
        TypeError: by the decorator: the root tag or the namespace is invalid, or XML cannot represent a field,
            which the text names.
    """

    def decorated(cls: C) -> C:
        tag = root_tag or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
        space = namespace or f"urn:trunkline:payload:{tag}:1"
        if not is_name(tag) or not re.match("[A-Za-z]", tag):
            raise TypeError(f"{cls.__name__}: {tag!r} is not a root tag (a name that begins with a letter)")
        if not _NAMESPACE(space) or space == _ENVELOPE_NAMESPACE:
            raise TypeError(f"{cls.__name__}: {space!r} is not a namespace for a payload")
        shape = record_of(cls, space)
        found = PayloadType(
            cls,
            tag,
            space,
            _derived_xsd(tag, space, shape),
            _derived_example(tag, space, shape),
            _derived_tool_description(tag, shape),
            shape,
        )
        setattr(cls, ATTRIBUTE, found)
        return cls

    return decorated


def payload_type_of(cls: type) -> PayloadType:
    """Return the payload type of a class that was decorated with `@payload()`.

    Raises TypeError for any other class, also for a subclass of a decorated one.
    """
    found = cls.__dict__.get(ATTRIBUTE)
    if not isinstance(found, PayloadType):
        raise TypeError(f"{cls.__name__} is not a payload: decorate it with @payload()")
    return found


def to_xml(instance: Any) -> bytes:
    """Return an instance of a payload class as canonical XML bytes, to be sent as a payload.

    Raises TypeError when its class is not decorated with `@payload()`. Raises ValueError, which names the
    field, for a value that XML cannot represent.
    """
    return payload_type_of(type(instance)).write(instance)


def from_element(cls: type, element: Any) -> Any:
    """Return the instance of the payload class `cls` that an lxml element describes.

    The element must have no comments. Raises Faulty("value"), with an example of a correct payload, for another
    root tag, a wrong field or a wrong value. Raises TypeError when `cls` is not decorated with `@payload()`.
    """
    kind = payload_type_of(cls)
    if element.tag != kind.qualified_tag:
        raise Faulty("value", f"not a <{kind.root_tag}> of {kind.namespace}", kind.example.decode())
    try:
        return kind.read(element)
    except Faulty as fault:
        raise Faulty(fault.step, fault.why, kind.example.decode()) from None
