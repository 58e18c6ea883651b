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
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar
from xml.sax.saxutils import escape

from lxml import etree  # type: ignore[import-untyped]

from connectors.terminal.terminal_text import escaped
from connectors.xml_payloads.shapes import Record, Slot, record_of
from connectors.xml_payloads.xsd import derived_example, derived_tool_description, derived_xsd
from connectors.xml_wire.faults import Faulty, quoted
from schemas.keys.private_files import make_first
from schemas.wire.ids import is_name


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


def cached_schema(folder: Path, listener: str, kind: PayloadType) -> Any:
    """Return the compiled schema of a payload, and write its text as the newest version on disk (XP-01).

    The file is `<folder>/<listener>/<root tag>/v1.xsd`, with a new version for each change. The files are for
    people and other programs. The pump compiles the schema of the class. A file that was edited by hand is not
    used; it only causes the next version.

    Any number of processes may call it at once. Raises ValueError for a listener's name that CM-01 forbids, and
    OSError.
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
    """A registered payload class and the documents that are derived from it."""

    cls: type
    root_tag: str
    namespace: str
    xsd: str
    example: bytes
    tool_description: dict[str, Any]
    shape: Record = field(repr=False, compare=False)

    @cached_property
    def qualified_tag(self) -> str:
        """The root tag as lxml writes it."""
        return f"{{{self.namespace}}}{self.root_tag}"

    @cached_property
    def schema(self) -> Any:
        """The compiled schema, shared by all callers that only need to know whether an element is valid."""
        return self.compiled()

    def read(self, element: Any) -> Any:
        """Return the value of an element that is valid by the schema. Raises Faulty("value")."""
        return read_record(self.shape, element)

    def write(self, instance: Any) -> bytes:
        """Return the canonical element of a value. Raises ValueError for a value that XML cannot hold."""
        content = _written(self.shape, instance, self.cls.__name__)
        return f'<{self.root_tag} xmlns="{escape(self.namespace)}">{content}</{self.root_tag}>'.encode()

    def compiled(self) -> Any:
        """Return a new schema object. Callers that share a schema object share its list of errors."""
        return etree.XMLSchema(etree.fromstring(self.xsd.encode()))


def payload(root_tag: str | None = None, namespace: str | None = None) -> Callable[[C], C]:
    """Make a dataclass a payload class.

    The default root tag is the class's name in lower case, its words joined by hyphens. The default namespace
    is `urn:trunkline:payload:<root tag>:1`. Raises TypeError for an invalid name, and for a class that XML
    cannot hold, with the field.
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
            derived_xsd(tag, space, shape),
            derived_example(tag, space, shape),
            derived_tool_description(tag, shape),
            shape,
        )
        setattr(cls, ATTRIBUTE, found)
        return cls

    return decorated


def payload_type_of(cls: type) -> PayloadType:
    """Return the payload type of a decorated class. Raises TypeError if the class itself was not decorated."""
    found = cls.__dict__.get(ATTRIBUTE)
    if not isinstance(found, PayloadType):
        raise TypeError(f"{cls.__name__} is not a payload: decorate it with @payload()")
    return found


def to_xml(instance: Any) -> bytes:
    """Return the canonical payload element of a value.

    Raises ValueError with the field for a value that XML cannot hold.
    """
    return payload_type_of(type(instance)).write(instance)


def from_element(cls: type, element: Any) -> Any:
    """Return the value of a payload element without comments. Raises Faulty("value")."""
    kind = payload_type_of(cls)
    if element.tag != kind.qualified_tag:
        raise Faulty("value", f"not a <{kind.root_tag}> of {kind.namespace}", kind.example.decode())
    try:
        return kind.read(element)
    except Faulty as fault:
        raise Faulty(fault.step, fault.why, kind.example.decode()) from None
