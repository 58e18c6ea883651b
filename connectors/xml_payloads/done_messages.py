"""What came of a message: the outcome and the answers, as the gateway is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from connectors.xml_payloads.listener_info import LeasedMessage

HANDLED: Final = "handled"
HUH: Final = "huh"
NACK: Final = "nack"
_REASON_LIMIT: Final = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """One payload that a listener answers. `to` None: to every listener of its root tag, or to who asked."""

    to: str | None
    kind: str
    namespace: str
    body: str


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a message. `huh`: the one answer says what was wrong; `nack`: it is given back."""

    message: LeasedMessage
    outcome: Literal["handled", "huh", "nack"]
    reason: str = ""
    answers: Sequence[Answer] = ()

    def as_json(self) -> dict[str, Any]:
        """As the gateway takes it."""
        return {
            "listener": self.message.listener,
            "message_id": self.message.message_id,
            "request_id": self.message.request_id,
            "outcome": self.outcome,
            "reason": self.reason[:_REASON_LIMIT],
            "answers": [
                {"to": a.to, "kind": a.kind, "namespace": a.namespace, "body": a.body} for a in self.answers
            ],
        }


class AnswerFault(ValueError):
    """A listener's answer cannot be used; `str()` says why, without quoting it."""
