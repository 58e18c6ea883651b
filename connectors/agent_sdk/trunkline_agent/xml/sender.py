"""`XmlSender` and `AsyncXmlSender`: send XML payloads to the listeners of the XML pump."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final, Self

from trunkline_agent.credentials import Credentials
from trunkline_agent.errors import UsageError
from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.plans import Answer, Plan, Request, Retries, exchange
from trunkline_agent.hub.sync_client import HubClient
from trunkline_agent.wire.ids import is_name
from trunkline_agent.xml.checked_payload import checked_payload
from trunkline_agent.xml.envelope import wrapped
from trunkline_agent.xml.posting import MEDIA_TYPE, PATH, PostedXml, is_answer, posted_of, refusal_of

PATIENCE_S: Final = 30.0
# The hub waits for Kafka and for its own verdict before it answers.
_ANSWER_S: Final = 30.0


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
