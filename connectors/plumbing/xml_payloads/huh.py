"""The answer `<huh>` (XP-02): what was wrong with a message, and what would have been right.

It shows nothing of threads, no value of the message, and little else. Its reader may be a language model, whose
context the text becomes part of.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from connectors.plumbing.xml_payloads.payload_types import PayloadType, payload, to_xml
from connectors.plumbing.xml_wire.documents import Faulty, quoted
from connectors.plumbing.xml_wire.mending import NOT_XML, REPLACEMENT

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
    """Return the XML payload `<huh>` that tells a sender why its message was not handled.

    Too long texts are cut, so that the payload stays small. Nothing is sent.

    Args:
        fault: The fault, or a text that says what was wrong.
        about_tag: The root tag of the sender's message, None if it had none.
        step: The step of processing that failed. None means the fault's own step, or `handler` for a text.
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


_SHOWN: Final = 3
_LIMIT: Final = 200
# Greedy, because a value may contain quotes and the same words.
_VALUES: Final = (
    (re.compile(r": '.*' is not a valid value", re.DOTALL), ": this is not a valid value"),
    (re.compile(r"The value '.*' (?=is not|has )", re.DOTALL), "its value "),
)


def wrong_root(kind: PayloadType, tag: str) -> str:
    """Return the error text for a payload whose root tag is `tag`, when `kind` is the expected payload type."""
    return f'the payload is <{quoted(tag)}>, asked for is <{kind.root_tag} xmlns="{kind.namespace}">'


def schema_fault(kind: PayloadType, element: Any) -> str:
    """Return one text with the schema errors of a payload element, for the payload's writer to act on.

    Call it for an lxml element that the schema of `kind` has rejected; it validates the element again. The text
    shows at most three errors, and no value of the element. May be called from any thread.
    """
    schema = kind.compiled()
    if schema.validate(element):
        return "the payload is not valid"
    found = list(schema.error_log)
    said: list[str] = []
    for error in found:
        text = _worded(error.message, kind.namespace)
        # libxml2 reports a wrong value twice, by its facet and by its type.
        if text not in said and not any(known.startswith(text.split(":")[0] + ":") for known in said):
            said.append(text)
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return "; ".join(said[:_SHOWN]) + more


def _worded(message: str, namespace: str) -> str:
    for pattern, words in _VALUES:
        message = pattern.sub(words, message)
    message = message.replace(f"{{{namespace}}}", "")
    return quoted(message, _LIMIT)
