"""The verification on the page about webhooks, as a receiver takes it from there (WH-04)."""

from __future__ import annotations

import re
import time

import pytest

from connectors.hub.webhooks.webhook_client import new_webhook_secret, signature_headers
from schemas.settings.settings import PROJECT_ROOT

pytestmark = pytest.mark.requirement("WH-04")

PAGE = (PROJECT_ROOT / "docs" / "how-to" / "receive_by_webhook.md").read_text(encoding="utf-8")
SECRET, OTHER = new_webhook_secret(b"s" * 32), new_webhook_secret(b"o" * 32)


def test_the_verification_of_the_page_takes_what_is_signed_and_nothing_else():
    (code,) = re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL)
    scope = {}
    exec(code, scope)  # noqa: S102  it is our own page
    verified, now = scope["verified"], int(time.time())
    headers, body = signature_headers((OTHER, SECRET), "m1", now, b'{"a":1}'), b'{"a":1}'
    assert verified(SECRET, headers, body)
    assert verified(OTHER, headers, body)
    assert not verified(new_webhook_secret(b"x" * 32), headers, body)
    assert not verified(SECRET, headers, b'{"a":2}')
    assert not verified(SECRET, {**headers, "webhook-id": "m2"}, body)
    assert not verified(SECRET, {**headers, "webhook-timestamp": str(now + 1)}, body)
    assert not verified(SECRET, signature_headers((SECRET,), "m1", now - 3600, body), body)
