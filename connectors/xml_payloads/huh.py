"""The answer `<huh>` (XP-02): what was wrong with a message, and what would have been right.

It shows nothing of threads, no value of the message, and little of the rest: its reader may be a language
model, and what it is told ends up in that model's context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from connectors.xml_payloads.payload_types import payload, to_xml
from connectors.xml_wire.xml_faults import Faulty, quoted
from connectors.xml_wire.xml_mending import NOT_XML, REPLACEMENT

HUH_TAG: Final = "huh"
HUH_NAMESPACE: Final = "urn:trunkline:huh:1"
_WHY_CHARACTERS: Final = 1000
_EXPECTED_CHARACTERS: Final = 16_000


@payload(HUH_TAG, namespace=HUH_NAMESPACE)
@dataclass(frozen=True)
class Huh:
    """Your message was not understood: why, and what would have been right."""

    about: str
    step: str
    why: str
    expected: str


def huh(fault: Faulty | str, *, about_tag: str | None, step: str | None = None) -> bytes:
    """The payload that tells a sender of a fault. `about_tag` is the root tag of the message, None if it had
    none; `step` is where it failed, by default the fault's own.
    """
    if isinstance(fault, Faulty):
        why, expected, where = fault.why, fault.expected, step or fault.step
        if fault.notes:
            why += f" (repaired before: {'; '.join(fault.notes[:3])})"
    else:
        why, expected, where = fault, "", step or "handler"
    return to_xml(
        Huh(
            quoted(about_tag or ""),
            quoted(where),
            _clipped(why, _WHY_CHARACTERS),
            _clipped(expected, _EXPECTED_CHARACTERS),
        )
    )


def _clipped(text: str, limit: int) -> str:
    text = NOT_XML.sub(REPLACEMENT, text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
