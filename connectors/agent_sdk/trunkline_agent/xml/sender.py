"""`XmlSender` and `AsyncXmlSender`: send XML payloads to listeners of the pump, read answers (XP-15)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from trunkline_agent.credentials import Credentials
from trunkline_agent.errors import MessageRejected, TrunklineError, UsageError
from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.plans import Answer, Plan, Request, Retries, exchange
from trunkline_agent.hub.sync_client import HubClient
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.ids import is_name
from trunkline_agent.xml.envelope import checked_payload, safe_root, wrapped

PATIENCE_S: Final = 30.0
# The hub waits for Kafka and for its own verdict before it answers.
_ANSWER_S: Final = 30.0
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


def posting(
    to: str | None,
    payload: Any,
    *,
    thread: str | None,
    key: str | None,
    query: Mapping[str, Any],
    patience_s: float,
) -> Plan[PostedXml]:
    """Return the plan that posts one message. Raises UsageError at once for what cannot be sent."""
    if to is not None and not is_name(to):
        raise UsageError(f"to: {to!r} is not the name of a listener")
    if thread is not None:
        try:
            thread = str(uuid.UUID(thread))
        except (ValueError, AttributeError, TypeError):
            raise UsageError("thread: expected a UUID, such as `thread` of an earlier message") from None
    document = wrapped(checked_payload(payload), sender=None, to=to, thread=thread)
    headers = {"Content-Type": MEDIA_TYPE, "Idempotency-Key": key or str(uuid.uuid4())}
    request = Request("POST", PATH, query, headers, document, wait_s=_ANSWER_S)
    return _posting(request, Retries(patience_s))


def _posting(request: Request, retries: Retries) -> Plan[PostedXml]:
    answer = yield from exchange(request, retries, _is_final)
    posted = posted_of(answer.status, answer.body)
    if posted.huh is not None:
        raise refusal_of(posted.huh)
    return posted


def _is_final(answer: Answer) -> bool:
    return is_answer(answer.status, answer.headers.get("content-type", ""))


class XmlSender:
    """A sender to the XML door, for any number of threads. Use it as a context manager, or call `close`.

    Args:
        credentials: The agent's credentials, with the section `hub`.
        patience_s: How long a message is sent again while the hub does not answer or is too busy.

    Raises:
        UsageError: The credentials have no access to the hub, or it is not valid.
    """

    def __init__(self, credentials: Credentials, *, patience_s: float = PATIENCE_S) -> None:
        self._hub = HubClient(credentials.hub_access(), credentials.ca_certs)
        self._patience_s = patience_s

    def send(
        self,
        to: str | None,
        payload: Any,
        *,
        thread: str | None = None,
        priority: str | None = None,
        expires_in_s: float | None = None,
        deliver_after_s: float | None = None,
        key: str | None = None,
    ) -> PostedXml:
        """Send a payload to a listener, and return the ids of the stored messages and their thread.

        The pump checks the payload against the listener's schema later. A faulty one gets a `<huh>` in the
        agent's mailbox.

        Args:
            to: The listener. None: every listener of the payload's root tag.
            payload: One XML element, as text, as UTF-8 bytes, or as an element of lxml or `xml.etree`.
            thread: The thread of an earlier message, to continue its conversation.
            priority: `low`, `normal` or `high`.
            expires_in_s: After so many seconds the message is not delivered any more.
            deliver_after_s: The message is delivered after so many seconds.
            key: The idempotency key. The same key again is the same message. None makes a new one.

        Raises:
            UsageError: The payload is not well-formed, or another argument is not valid.
            MessageRejected: No listener takes it: the text says why, and `.advice` what would be right.
            RateLimited: Too many messages wait for the listener or from this agent.
            BackboneUnreachable: The hub did not answer within `patience_s`.
        """
        query = {"priority": priority, "expires_in_s": expires_in_s, "deliver_after_s": deliver_after_s}
        return self._hub.run(
            posting(to, payload, thread=thread, key=key, query=query, patience_s=self._patience_s)
        )

    def close(self) -> None:
        """Close the connections."""
        self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncXmlSender:
    """As `XmlSender`, for asyncio. Use it with `async with`, or call `close`."""

    def __init__(self, credentials: Credentials, *, patience_s: float = PATIENCE_S) -> None:
        self._hub = AsyncHubClient(credentials.hub_access(), credentials.ca_certs)
        self._patience_s = patience_s

    async def send(
        self,
        to: str | None,
        payload: Any,
        *,
        thread: str | None = None,
        priority: str | None = None,
        expires_in_s: float | None = None,
        deliver_after_s: float | None = None,
        key: str | None = None,
    ) -> PostedXml:
        """Send a payload to a listener, as `XmlSender.send` does, and return the same."""
        query = {"priority": priority, "expires_in_s": expires_in_s, "deliver_after_s": deliver_after_s}
        return await self._hub.run(
            posting(to, payload, thread=thread, key=key, query=query, patience_s=self._patience_s)
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._hub.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
