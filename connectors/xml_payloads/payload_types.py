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

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeVar

from lxml import etree  # type: ignore[import-untyped]

from connectors.xml_payloads.shapes import Record, record_of
from connectors.xml_payloads.values import read_record, written_payload
from connectors.xml_payloads.xsd import derived_example, derived_tool_description, derived_xsd
from connectors.xml_wire.faults import Faulty
from schemas.wire.ids import is_name

ATTRIBUTE: Final = "__payload_type__"
_ENVELOPE_NAMESPACE: Final = "urn:trunkline:envelope:1"
# Printable ASCII that needs no escape, with a scheme: a relative name means something else elsewhere.
_NAMESPACE: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$()*+,;=%-]{1,200}").fullmatch
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class PayloadType:
    """A registered payload class and what is derived from it."""

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
        """The compiled schema, one for all who only ask whether something is valid."""
        return self.compiled()

    def read(self, element: Any) -> Any:
        """The value of an element that is valid by the schema. Raises Faulty("value")."""
        return read_record(self.shape, element)

    def write(self, instance: Any) -> bytes:
        """The canonical element of a value. Raises ValueError for what XML cannot hold."""
        return written_payload(self.root_tag, self.namespace, self.shape, instance)

    def compiled(self) -> Any:
        """A schema object of its own: its list of errors is shared by all who use it."""
        return etree.XMLSchema(etree.fromstring(self.xsd.encode()))


def payload(root_tag: str | None = None, namespace: str | None = None) -> Callable[[C], C]:
    """Make a dataclass a payload. Without a root tag it is the class's name in lower case, words joined by
    hyphens; without a namespace `urn:trunkline:payload:<root tag>:1`. Raises TypeError for a class that XML
    cannot hold, naming the field, and for names that are none.
    """

    def decorated(cls: C) -> C:
        tag = root_tag or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
        space = namespace or f"urn:trunkline:payload:{tag}:1"
        if not is_name(tag) or not re.match("[A-Za-z]", tag):
            raise TypeError(f"{cls.__name__}: {tag!r} is no root tag (a name that begins with a letter)")
        if not _NAMESPACE(space) or space == _ENVELOPE_NAMESPACE:
            raise TypeError(f"{cls.__name__}: {space!r} is no namespace for a payload")
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
    """What was derived from a decorated class. Raises TypeError for a class that was not decorated itself."""
    found = cls.__dict__.get(ATTRIBUTE)
    if not isinstance(found, PayloadType):
        raise TypeError(f"{cls.__name__} is no payload: decorate it with @payload()")
    return found


def to_xml(instance: Any) -> bytes:
    """The canonical payload element of a value. Raises ValueError for what XML cannot hold, with the field."""
    return payload_type_of(type(instance)).write(instance)


def from_element(cls: type, element: Any) -> Any:
    """The value of a payload element without comments. Raises Faulty("value")."""
    kind = payload_type_of(cls)
    if element.tag != kind.qualified_tag:
        raise Faulty("value", f"not a <{kind.root_tag}> of {kind.namespace}", kind.example.decode())
    try:
        return kind.read(element)
    except Faulty as fault:
        raise Faulty(fault.step, fault.why, kind.example.decode()) from None
