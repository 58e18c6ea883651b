"""The demo's scene at the XML pump: the listeners of conf/organism.yaml are asked by XML, and answer.

The calculator, the search pair (the fast one answers before the slow one is done), and a researcher that asks
them all by itself and reports.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.gateway_client.operator_token import ensure_operator_token
from connectors.xml_wire.envelope import ENVELOPE_NAMESPACE
from connectors.xml_wire.posting import post_xml
from schemas.settings.settings import Settings
from schemas.streams.principal.principals import OPERATOR

_SAMPLE: Final = "urn:trunkline:sample:1"
_POLL_S: Final = 0.1
_ANSWER_S: Final = 30.0


class _Question(NamedTuple):
    """What is asked, who answers in this order, and with what."""

    payload: str
    answered_by: tuple[str, ...]
    kind: str
    label: str


_QUESTIONS: Final = (
    _Question(
        "<calculate xmlns='{0}'><operation>multiply</operation><first>6</first><second>7</second></calculate>",
        ("calculator",),
        "result",
        "6 times 7",
    ),
    _Question(
        "<search xmlns='{0}'><query>log mailbox</query></search>",
        ("index_search", "archive_search"),
        "found",
        "a search",
    ),
    _Question("<research xmlns='{0}'><text>logs</text></research>", ("researcher",), "report", "a research"),
)


class PumpScene:
    """What the demo asks of the pump, as the operator. `told`: a line on each question."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.told: list[str] = []

    def play(self, tick: Callable[[], None]) -> list[str]:
        """Ask all of them; returns what went otherwise than planned. `tick` is called a few times a second."""
        differences = []
        with GatewayClient(self._settings, token=ensure_operator_token(self._settings)) as hub:
            there = {row["listener"] for row in hub.get(path_of("listeners"))["listeners"]}
            for question in _QUESTIONS:
                # A stack that stays may have listeners of its own alone.
                if not set(question.answered_by) <= there:
                    continue
                answered = self._answers(hub, question, tick)
                wanted = [(name, question.kind) for name in question.answered_by]
                if answered != wanted:
                    differences.append(f"{question.label}: planned answers {wanted}, they are {answered}")
                order = ", then ".join(name for name, _ in answered)
                self.told.append(f"The XML pump was asked for {question.label}; answers by {order}")
        return differences

    def _answers(
        self, hub: GatewayClient, question: _Question, tick: Callable[[], None]
    ) -> list[tuple[str, str]]:
        """Sender and kind of each answer, in the order in which they came; those that have not come, are not
        among them.
        """
        payload = question.payload.format(_SAMPLE)
        document = f'<message xmlns="{ENVELOPE_NAMESPACE}">{payload}</message>'.encode()
        posted = post_xml(hub, document, request_id=str(uuid.uuid4()))
        if posted.huh is not None:
            return [("nobody", posted.huh)]
        deadline = time.monotonic() + _ANSWER_S
        while True:
            # Looked at, not taken out: what else lies there is the operator's.
            page = hub.get(path_of("mailboxes", "default", OPERATOR), {"limit": 1000})["messages"]
            mine: list[dict[str, Any]] = [row for row in page if row["thread"] == posted.thread]
            if len(mine) >= len(question.answered_by) or time.monotonic() > deadline:
                return [(row["sender"], row["kind"]) for row in sorted(mine, key=lambda row: row["posted_at"])]
            tick()
            time.sleep(_POLL_S)
