"""One call of a webhook: a signed CloudEvent by POST, and how it ended. No redirect is followed.

The calls use neither a proxy nor cookies, and nothing of the environment. Connections are kept some seconds.
The health of webhooks is in the memory of one gateway: the newest calls, and how many have failed in a row.

Signatures are by the Standard Webhooks specification, version 1.0, at
https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md. A call has the
headers `webhook-id`, `webhook-timestamp` and `webhook-signature`. A signature is `v1,` and the base64 of the
HMAC-SHA256 (RFC 2104) of `<id>.<timestamp>.<body>`. While a secret is rotated, there are two.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ssl
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import httpcore2

from connectors.hub.webhooks.addresses import AddressRefusedError, AddressRule, CheckedBackend
from schemas.settings.settings import PROJECT_ROOT, WebhookSettings
from schemas.streams.webhook.webhooks import UrlParts, url_parts
from trunkline_agent.hub.answer_errors import retry_after_s

PREFIX: Final = "whsec_"
SECRET_BYTES: Final = 32


def new_webhook_secret(key: bytes) -> str:
    """Return the secret of a webhook, `whsec_` and the base64 of `key`, which has 24 to 64 bytes."""
    return PREFIX + base64.b64encode(key).decode("ascii")


def signature_headers(secrets: Sequence[str], message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the three headers that sign one call.

    Args:
        secrets: the secrets, by `new_webhook_secret`, the newest first. Each makes one signature.
        message_id: the id of the message. It is the same in each attempt, and contains no dot.
        timestamp_s: the time of this attempt, in seconds since 1970 UTC.
        body: the body of the call, as it is sent.
    """
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    signatures = [
        hmac.digest(base64.b64decode(secret.removeprefix(PREFIX)), signed, "sha256") for secret in secrets
    ]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(one).decode('ascii')}" for one in signatures),
    }


CLOUD_EVENT: Final = "application/cloudevents+json"
GONE: Final = 410
_MULTIPLE_CHOICES: Final = 300
_BAD_REQUEST: Final = 400
# More of an answer is not read, and nothing of it is stored.
ANSWER_BYTES_MOST: Final = 4096
_ANSWER_S: Final = 1.0
_KEEP_S: Final = 15.0
_KEPT_MOST: Final = 100
_CALL_IDS: Final = uuid.UUID("4a0f7a52-6f0e-4a53-9a57-3a3a1f0c8d11")


class Target(NamedTuple):
    """An address to call.

    Attributes:
        webhook: the name of the webhook.
        revision: the revision of the webhook.
        url: the address.
        secrets: the secrets that sign the calls, the newest first.
    """

    webhook: str
    revision: int
    url: str
    secrets: Sequence[str]


class CallResult(NamedTuple):
    """The result of one call.

    Attributes:
        status: the HTTP status; None without an answer.
        why: why the call has failed, without anything that the address has answered. "": it succeeded.
        seconds: how long it took.
        retry_after_s: the seconds until the next attempt that the address wants; None if it wants none.
    """

    status: int | None
    why: str
    seconds: float
    retry_after_s: float | None = None

    @property
    def is_ok(self) -> bool:
        """True if the address has answered with a status of 200 to 299."""
        return not self.why


class WebhookClient:
    """Calls webhooks, for coroutines of one event loop."""

    def __init__(self, settings: WebhookSettings) -> None:
        self.rule = AddressRule(settings)
        self._settings = settings
        self._pool: httpcore2.AsyncConnectionPool | None = None

    async def call(self, target: Target, message_id: str, event: bytes) -> CallResult:
        """Call an address with one event. Takes at most `webhooks.timeout_s` seconds, and raises no error.

        Args:
            target: the address and its secrets.
            message_id: the id of the event in its mailbox, from which `call_id` makes the header `webhook-id`.
            event: the event as JSON, a CloudEvent in structured form.
        """
        started, total_s = time.monotonic(), self._settings.timeout_s
        status: int | None = None
        retry_after_s: float | None = None
        try:
            self.rule.check_url(target.url)
            async with asyncio.timeout(total_s):
                status, retry_after_s = await self._post(target, message_id, event)
            why = _why(status)
        except TimeoutError:
            why = f"no answer within {total_s:g} s"
        except AddressRefusedError as error:
            why = str(error)
        except httpcore2.TimeoutException:
            why = f"no connection within {self._settings.connect_timeout_s:g} s"
        except (httpcore2.NetworkError, httpcore2.ProtocolError, ssl.SSLError, OSError, ValueError) as error:
            # Without the error's text, which may quote what the other side has sent.
            why = f"no answer: {type(error).__name__}"
        return CallResult(status, why, time.monotonic() - started, retry_after_s)

    async def _post(self, target: Target, message_id: str, event: bytes) -> tuple[int, float | None]:
        parts = url_parts(target.url)
        headers = {
            "Host": _host_header(parts),
            "User-Agent": "Trunkline-Webhooks/1",
            "Content-Type": CLOUD_EVENT,
            "Accept": "*/*",
            **signature_headers(target.secrets, call_id(target.webhook, message_id), int(time.time()), event),
        }
        url = httpcore2.URL(
            scheme=parts.scheme.encode(),
            host=parts.host.encode(),
            port=parts.port,
            target=parts.target.encode(),
        )
        connect_s = self._settings.connect_timeout_s
        asked = self._open_pool().stream(
            "POST",
            url,
            headers=[(name.encode(), text.encode()) for name, text in headers.items()],
            content=event,
            extensions={"timeout": {"connect": connect_s}},
        )
        async with asked as response:
            answered = {name.decode().lower(): text.decode("latin-1") for name, text in response.headers}
            with suppress(TimeoutError, httpcore2.NetworkError, httpcore2.ProtocolError):
                async with asyncio.timeout(_ANSWER_S):
                    await _read(response)
            return response.status, retry_after_s(answered, time.time()) or None

    def _open_pool(self) -> httpcore2.AsyncConnectionPool:
        # Made with the first call, because reading the authorities takes some time.
        if self._pool is None:
            trusted = self._settings.ca_certs
            context = ssl.create_default_context(cafile=None if trusted is None else PROJECT_ROOT / trusted)
            self._pool = httpcore2.AsyncConnectionPool(
                ssl_context=context,
                max_connections=None,
                max_keepalive_connections=_KEPT_MOST,
                keepalive_expiry=_KEEP_S,
                network_backend=CheckedBackend(self.rule),
            )
        return self._pool

    async def close(self) -> None:
        """Close all connections."""
        if self._pool is not None:
            await self._pool.aclose()


def call_id(webhook: str, message_id: str) -> str:
    """Return the id by which a receiver knows a repeated call: the same in each attempt, of this event alone.

    A sender over MQTT or by the file queue chooses the id of a message, which is unique in one mailbox only.
    """
    return f"msg_{uuid.uuid5(_CALL_IDS, f'{webhook}/{message_id}').hex}"


def _host_header(parts: UrlParts) -> str:
    host = f"[{parts.host}]" if ":" in parts.host else parts.host
    return host if parts.port == {"http": 80, "https": 443}[parts.scheme] else f"{host}:{parts.port}"


async def _read(response: httpcore2.Response) -> None:
    """Read an answer, so that its connection can be kept. A longer answer is not read to its end."""
    count = 0
    async for part in response.aiter_stream():
        count += len(part)
        if count > ANSWER_BYTES_MOST:
            return


def _why(status: int) -> str:
    if _MULTIPLE_CHOICES <= status < _BAD_REQUEST:
        return f"HTTP status {status}: redirects are not followed"
    return "" if status < _MULTIPLE_CHOICES else f"HTTP status {status}"


@dataclass(frozen=True)
class Health:
    """The calls of one webhook by this gateway. Times are microseconds since 1970 UTC, and None for never.

    Attributes:
        succeeded: The number of calls that succeeded.
        failed: The number of calls that failed.
        failures_in_a_row: The number of failed calls since the newest that succeeded.
        last_failure: Why the newest failed call has failed; "" if none has.
    """

    succeeded: int = 0
    failed: int = 0
    failures_in_a_row: int = 0
    last_success_at: int | None = None
    last_failure_at: int | None = None
    last_failure: str = ""


class WebhookHealth:
    """The health of all webhooks that this gateway has called since its start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Health] = {}

    def of(self, webhook: str) -> Health:
        """Return the health of a webhook. It is that of no call if this gateway has made none."""
        with self._lock:
            return self._known.get(webhook, Health())

    def note(self, webhook: str, result: CallResult) -> None:
        """Count a call."""
        now_us = int(time.time() * 1e6)
        with self._lock:
            known = self._known.get(webhook, Health())
            if result.is_ok:
                found = replace(
                    known, succeeded=known.succeeded + 1, failures_in_a_row=0, last_success_at=now_us
                )
            else:
                found = replace(
                    known,
                    failed=known.failed + 1,
                    failures_in_a_row=known.failures_in_a_row + 1,
                    last_failure_at=now_us,
                    last_failure=result.why,
                )
            self._known[webhook] = found

    def forget(self, webhook: str) -> None:
        """Forget the calls of a webhook that was removed."""
        with self._lock:
            self._known.pop(webhook, None)
