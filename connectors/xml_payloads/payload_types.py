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
        return written_payload(self.root_tag, self.namespace, self.shape, instance)

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
