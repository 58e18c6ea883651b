"""What is wrong with a payload, from the validator's list of errors: without values, in words to act on."""

from __future__ import annotations

import re
from typing import Any, Final

from connectors.terminal.terminal_text import escaped
from connectors.xml_payloads.payload_types import PayloadType
from connectors.xml_wire.xml_faults import quoted

_SHOWN: Final = 3
_LIMIT: Final = 200
# Greedy: a value may hold quotes and these very words.
_VALUES: Final = (
    (re.compile(r": '.*' is not a valid value", re.DOTALL), ": this is not a valid value"),
    (re.compile(r"The value '.*' (?=is not|has )", re.DOTALL), "its value "),
)


def wrong_root(kind: PayloadType, tag: str) -> str:
    """What to say of a payload with another root tag."""
    return f'the payload is <{quoted(tag)}>, asked for is <{kind.root_tag} xmlns="{kind.namespace}">'


def schema_fault(kind: PayloadType, element: Any) -> str:
    """What the schema has against an element. It is asked anew: a list of errors is no thread's own."""
    schema = kind.compiled()
    if schema.validate(element):
        return "the payload is not valid"
    found = list(schema.error_log)
    said: list[str] = []
    for error in found:
        text = _worded(error.message, kind.namespace)
        # One wrong value is told twice, by its facet and by its type.
        if text not in said and not any(known.startswith(text.split(":")[0] + ":") for known in said):
            said.append(text)
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return "; ".join(said[:_SHOWN]) + more


def _worded(message: str, namespace: str) -> str:
    for pattern, words in _VALUES:
        message = pattern.sub(words, message)
    message = message.replace(f"{{{namespace}}}", "")
    shown = escaped(message)
    return shown if len(shown) <= _LIMIT else shown[: _LIMIT - 1] + "…"
