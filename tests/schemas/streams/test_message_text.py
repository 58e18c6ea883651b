"""The form of a text at the doors of text and of JSON, by the vectors that the libraries share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.settings.settings import PROJECT_ROOT
from schemas.streams.mailboxes.message_text import TEXT_CONTENT, shown_json, shown_text
from schemas.wire.record import JSON_CONTENT
from trunkline_agent.command.message_commands import body_of
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("AG-96")
VECTORS = json.loads((PROJECT_ROOT / "connectors/agent_sdk/vectors/hub.json").read_bytes())["texts"]


@pytest.mark.parametrize("one", VECTORS, ids=lambda one: f"{one['content_type']} {one['body']}")
def test_a_body_is_shown_as_the_vectors_say(one: dict[str, Any]) -> None:
    text, content_type = shown_text(one["body"], one["content_type"])
    assert text == one["text"]
    assert content_type == (one["content_type"] if text == one["body"] else TEXT_CONTENT)
    payload = shown_json(one["body"], one["content_type"])
    assert json.dumps(payload) == json.dumps(one["payload"])
    # A payload that a reader of JSON sends back as it got it is the same text.
    again = canonical(payload).decode()
    assert shown_text(again, JSON_CONTENT)[0] == text
    # The command line shows the same text.
    if isinstance(payload, str | dict) and content_type == TEXT_CONTENT:
        assert body_of(payload) == text
