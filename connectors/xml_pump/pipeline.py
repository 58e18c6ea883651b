"""A listener's pipeline (XP-02): bytes in; a value out, or a fault for the sender.

    pipeline = Pipeline(payload_type_of(Calculate))
    taken = pipeline.run(document)
    taken.value, taken.notes

The steps in order are `repair` (parse once; mend if necessary; remove comments, processing instructions and
schema hints), `canonicalization` (C14N of the payload), `envelope`, `extraction`, `payload`, `value`. Nothing
is parsed twice. `Pipeline(None)` is the system's pipeline (XP-10): it has no schema, and its value is the
element itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, Final

from connectors.xml_payloads.huh import schema_fault, wrong_root
from connectors.xml_payloads.payload_types import PayloadType
from connectors.xml_wire.envelope import OpenedMessage, canonical_payload, check_envelope, content_of
from connectors.xml_wire.faults import DEFAULT_LIMITS, Faulty, XmlLimits
from connectors.xml_wire.safe_xml import repair

STEPS: Final = ("repair", "canonicalization", "envelope", "extraction", "payload", "value")


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The result of a pipeline. `step_ns` is empty unless the run was timed."""

    message: OpenedMessage
    value: Any
    notes: tuple[str, ...] = ()
    step_ns: dict[str, int] = field(default_factory=dict)


class Pipeline:
    """The pipeline of one listener. Thread-safe."""

    def __init__(
        self, kind: PayloadType | None, schema: Any = None, limits: XmlLimits = DEFAULT_LIMITS
    ) -> None:
        """Make a pipeline. `schema` is the compiled schema of `kind`; None for the kind's own."""
        self._kind = kind
        self._limits = limits
        self._schema = kind.schema if kind is not None and schema is None else schema

    def run(self, document: bytes, *, timed: bool = False) -> PipelineResult:
        """Run all steps on a whole document.

        Raises XmlRefused, and Faulty for a fault that becomes a `<huh>`.
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
        """Run the steps from the payload check on, for a payload element alone, from any door.

        The element is parsed as carefully as a document. Raises XmlRefused, Faulty.
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
