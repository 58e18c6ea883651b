"""Signatures of webhook calls, by the Standard Webhooks specification, version 1.0.

The specification is at https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md.
A call has the headers `webhook-id`, `webhook-timestamp` and `webhook-signature`. A signature is `v1,` and the
base64 of the HMAC-SHA256 (RFC 2104) of `<id>.<timestamp>.<body>`. While a secret is rotated, there are two.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Sequence
from typing import Final

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
