"""The limits of an XML document, and the two errors for a wrong one: dropped, or answered with a `<huh>`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trunkline_agent.terminal_text import QUOTED_CHARACTERS, quoted

__all__ = ["DEFAULT_LIMITS", "QUOTED_CHARACTERS", "Faulty", "Step", "XmlLimits", "XmlRefused", "quoted"]


@dataclass(frozen=True, slots=True)
class XmlLimits:
    """The limits of an XML document (XP-03). A document over a limit is refused, early, as `too_large`.

    Attributes:
        document_bytes: the size of the document.
        depth: how deep elements may be nested.
        attributes: the number of attributes and namespace declarations of one tag. Canonicalization sorts them
            by insertion, and a hundred thousand cost 18 s.
        namespace_bytes: the size of one namespace. Canonical form repeats it wherever its prefix is used, so a
            long one in many elements would be a bomb without any entity.
        payloads: the number of payloads in one handler's answer.
    """

    document_bytes: int = 1024 * 1024
    depth: int = 64
    attributes: int = 64
    namespace_bytes: int = 256
    payloads: int = 100


DEFAULT_LIMITS = XmlLimits()


Step = Literal["envelope", "payload", "value", "routing"]


class XmlRefused(ValueError):
    """The XML document is refused and must be dropped: its sender gets no `<huh>` (XP-03).

    It has a DOCTYPE, is too large or too deep, is not UTF-8, or is no XML even after repair. `reason` is
    `too_large` for everything beyond a limit and `malformed` for the rest. The error's text says why.
    """

    def __init__(self, reason: Literal["malformed", "too_large"], why: str) -> None:
        super().__init__(why)
        self.reason = reason


class Faulty(ValueError):
    """The document is XML but not as expected. Its sender gets a `<huh>` (XP-02).

    `step` is the step that failed: `envelope`, `payload`, `value` or `routing`. `why` says what was wrong,
    without any value of the input. `expected` shows a correct document, or is empty. `notes` are the notes of
    the document's repair, which may explain the fault.
    """

    def __init__(self, step: Step, why: str, expected: str = "", notes: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.step = step
        self.why = why
        self.expected = expected
        self.notes = notes
