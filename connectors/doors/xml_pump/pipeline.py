"""A listener's pipeline (XP-02): the steps that check an XML document and turn its payload into an object.

    pipeline = Pipeline(payload_type_of(Calculate))
    taken = pipeline.run(document)
    taken.value, taken.notes

The steps in order are `repair` (parse once; mend if necessary; remove comments, processing instructions and
schema hints), `canonicalization` (C14N of the payload), `envelope`, `extraction`, `payload`, `value`. Nothing
is parsed twice. `Pipeline(None)` is the system's pipeline (XP-10): it has no schema, and its value is the
element itself.

A plain text of another door is a payload `<text kind="…">`, of the class `Text`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, Final

from connectors.plumbing.xml_payloads.huh import schema_fault, wrong_root
from connectors.plumbing.xml_payloads.payload_types import ATTRIBUTE, PayloadType
from connectors.plumbing.xml_payloads.shapes import record_of
from connectors.plumbing.xml_wire.documents import DEFAULT_LIMITS, Faulty, XmlLimits
from connectors.plumbing.xml_wire.envelope import (
    TEXT_NAMESPACE,
    OpenedMessage,
    canonical_payload,
    check_envelope,
    content_of,
    text_payload,
)
from connectors.plumbing.xml_wire.safe_xml import repair

STEPS: Final = ("repair", "canonicalization", "envelope", "extraction", "payload", "value")


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The result of a pipeline for one document.

    Attributes:
        message: The content of the envelope and the payload in canonical form.
        value: An instance of the listener's payload class; without a class, the payload's element.
        notes: The repairs that the document needed, in words.
        step_ns: The duration of each step in nanoseconds; empty unless the run was timed.
    """

    message: OpenedMessage
    value: Any
    notes: tuple[str, ...] = ()
    step_ns: dict[str, int] = field(default_factory=dict)


class Pipeline:
    """The steps that check the messages of one listener. Thread-safe."""

    def __init__(
        self, kind: PayloadType | None, schema: Any = None, limits: XmlLimits = DEFAULT_LIMITS
    ) -> None:
        """Make a pipeline.

        Args:
            kind: The payload type of the listener; None accepts any payload and returns its element.
            schema: The compiled XML schema of `kind`; None for the one that `kind` has itself.
            limits: The limits for a document's size and depth.
        """
        self._kind = kind
        self._limits = limits
        self._schema = kind.schema if kind is not None and schema is None else schema

    def run(self, document: bytes, *, timed: bool = False) -> PipelineResult:
        """Check a document, an envelope with one payload, and return its content with the payload as an object.

        A document that is not well-formed XML is repaired if no part of it is lost. `notes` of the result lists
        the changes, and is empty if there were none.

        Args:
            document: The bytes as they were received.
            timed: Whether to measure the duration of each step, for `step_ns` of the result.

        Raises:
            XmlRefused: The document is too large, unsafe (with a DOCTYPE) or cannot be repaired without loss.
                The caller drops it.
            Faulty: The envelope or the payload is wrong. The error has the text of the `<huh>` for the sender.
        """
        marks: list[int] = []

        def mark() -> None:
            if timed:
                marks.append(perf_counter_ns())

        mark()
        repaired = repair(document, self._limits)
        mark()
        root, notes = repaired.root, repaired.notes
        canonical = canonical_payload(root, notes, self._limits)
        mark()
        check_envelope(root, notes)
        mark()
        message = content_of(root, canonical, notes)
        mark()
        self._check(root[-1], message.notes)
        mark()
        value = self._value(root[-1], message.notes)
        mark()
        spent = [end - begin for begin, end in pairwise(marks)]
        return PipelineResult(message, value, message.notes, dict(zip(STEPS, spent, strict=False)))

    def run_payload(self, payload: bytes) -> Any:
        """Check a payload without an envelope, and return it as an instance of the listener's payload class.

        A pipeline without a payload class returns the payload's lxml element. The payload is repaired as in
        `run`, but the changes are not reported. Raises XmlRefused if it is too large, unsafe or cannot be
        repaired without loss, and Faulty if it does not match the payload type.
        """
        tag = self._kind.root_tag if self._kind else "message"
        repaired = repair(payload, self._limits, root_tag=tag)
        self._check(repaired.root, repaired.notes)
        return self._value(repaired.root, repaired.notes)

    def _check(self, element: Any, notes: tuple[str, ...]) -> None:
        kind = self._kind
        if kind is None:
            return
        if element.tag != kind.qualified_tag:
            raise Faulty("payload", wrong_root(kind, element.tag), kind.example.decode(), notes)
        if not self._schema.validate(element):
            raise Faulty("payload", schema_fault(kind, element), kind.example.decode(), notes)

    def _value(self, element: Any, notes: tuple[str, ...]) -> Any:
        kind = self._kind
        if kind is None:
            return element
        try:
            return kind.read(element)
        except Faulty as fault:
            raise Faulty("value", fault.why, kind.example.decode(), notes) from None


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
