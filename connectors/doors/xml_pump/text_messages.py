"""The payload class for plain text messages that come from other doors: `<text kind="…">`.

@handles(Note, replies=(Text,))
async def hear(message):
    if isinstance(message.payload, Text): ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from connectors.plumbing.xml_payloads.payload_types import ATTRIBUTE, PayloadType
from connectors.plumbing.xml_payloads.shapes import record_of
from connectors.plumbing.xml_wire.envelope import TEXT_NAMESPACE, text_payload

TEXT_TAG: Final = "text"
_XSD: Final = f"""<?xml version="1.0" encoding="UTF-8"?>
<xs:schema xmlns:xs="http://www.w3.org/2001/XMLSchema" targetNamespace="{TEXT_NAMESPACE}">
  <xs:element name="{TEXT_TAG}">
    <xs:complexType>
      <xs:simpleContent>
        <xs:extension base="xs:string">
          <xs:attribute name="kind" type="xs:string" use="required"/>
        </xs:extension>
      </xs:simpleContent>
    </xs:complexType>
  </xs:element>
</xs:schema>
"""


@dataclass(frozen=True)
class Text:
    """A plain text message. `body` is the text, and `kind` the message's type at the door that it came by."""

    kind: str
    body: str


@dataclass(frozen=True)
class _TextType(PayloadType):
    """A payload type that is not derived: the kind is an attribute, and the element holds the text."""

    def read(self, element: Any) -> Text:
        return Text(element.get("kind", ""), element.text or "")

    def write(self, instance: Any) -> bytes:
        return text_payload(instance.kind, instance.body)


_PARAMETERS: Final = {name: {"type": "string"} for name in ("kind", "body")}
setattr(
    Text,
    ATTRIBUTE,
    _TextType(
        Text,
        TEXT_TAG,
        TEXT_NAMESPACE,
        _XSD,
        text_payload("note", "some words"),
        {
            "name": TEXT_TAG,
            "description": "Say something in plain words.",
            "input_schema": {"type": "object", "properties": _PARAMETERS, "required": [*_PARAMETERS]},
        },
        record_of(Text, TEXT_NAMESPACE),
    ),
)
