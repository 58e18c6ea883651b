"""The request to the XML door, and what its answers mean (XP-15)."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline_agent.errors import MessageRejected, TrunklineError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.xml.checked_payload import safe_root

PATH = "/messages"
MEDIA_TYPE = "application/xml"
ACCEPTED, NOT_UNDERSTOOD = 202, 422
_TEXT_MOST = 1000


@dataclass(frozen=True)
class PostedXml:
    """The hub's answer to an XML document.

    Attributes:
        huh: the XML that says what was wrong; None: the message was accepted.
        thread: the thread of the accepted message, else empty.
        messages: the ids of the stored messages, by recipient.
    """

    huh: str | None
    thread: str
    messages: dict[str, str]


def is_answer(status: int, media_type: str) -> bool:
    """Return whether an answer is one that `posted_of` reads. Any other one is an error in JSON."""
    return media_type.startswith(MEDIA_TYPE) and status in (ACCEPTED, NOT_UNDERSTOOD)


def posted_of(status: int, body: bytes) -> PostedXml:
    """Return what an answer says. Raises TrunklineError if it is no answer of a hub."""
    if status == NOT_UNDERSTOOD:
        return PostedXml(body.decode("utf-8", "replace"), "", {})
    try:
        root = safe_root(body)
    except ValueError as error:
        raise TrunklineError(f"the answer is no XML of a hub: {error}", reason="not_a_gateway") from None
    return PostedXml(None, root.get("thread", ""), {one.get("to"): one.get("id") for one in root})


def refusal_of(huh: str) -> MessageRejected:
    """Return the error for a `<huh>`: what was wrong with a message, and what would have been right."""
    try:
        found = {child.tag.rpartition("}")[2]: child.text or "" for child in safe_root(huh.encode("utf-8"))}
    except ValueError:
        found = {}
    why = escaped(found.get("why", "") or "the message was not understood")[:_TEXT_MOST]
    step = escaped(found.get("step", ""))[:_TEXT_MOST]
    expected = escaped(found.get("expected", ""))[:_TEXT_MOST]
    return MessageRejected(f"{step}: {why}" if step else why, reason="huh", advice=expected)
