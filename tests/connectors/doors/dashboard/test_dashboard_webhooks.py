"""The dashboard shows how the calls of a webhook went (WH-05)."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from schemas.settings.settings import WebhookSettings
from tests.connectors.doors.dashboard.test_dashboard_page import live
from tests.connectors.hub.webhooks.receiver import Answer, receiving

pytestmark = pytest.mark.requirement("WH-05")

MESSAGES, WEBHOOKS = "/api/hub/messages", "/api/hub/webhooks"


def test_a_webhook_is_shown_as_it_delivers_fails_and_is_paused_and_opens_its_mailbox(
    backbone_settings, start_dashboard, open_page
):
    allowed = WebhookSettings(
        allow_networks="127.0.0.0/8", allow_http=True, retry_first_s=0.2, retry_most_s=0.2
    )
    dashboard = start_dashboard(backbone_settings.model_copy(update={"webhooks": allowed}))
    with receiving() as receiver, dashboard.client() as operator:
        page = live(open_page(dashboard.address))
        panel = page.locator("section[aria-labelledby='webhooks-title']")
        expect(panel).to_contain_text("No address is called.")
        url = f"{receiver.url}&key=canary"
        assert operator.post(f"{WEBHOOKS}/operator", json={"url": url}).is_success
        row = page.locator("[data-webhook='operator']")
        expect(row.locator(".state")).to_have_text("active")
        expect(row).to_contain_text("127.0.0.1")

        def send():
            assert operator.post(MESSAGES, json={"recipient": "operator", "type": "note"}).is_success

        send()
        expect(row).to_contain_text("delivered ")
        receiver.answers = [Answer(500, delay_s=0.05)] * 10_000
        send()
        expect(row.locator(".state")).to_have_text("down")
        for text in ("failures in a row", "HTTP status 500", "1 pending"):
            expect(row).to_contain_text(text)
        receiver.answers = [Answer(410)] * 100
        expect(row.locator(".state")).to_have_text("paused")
        expect(row).to_contain_text("the address answered 410 Gone")
        assert "canary" not in page.content()
        row.locator("button").click()
        expect(page.locator("#drawer-title")).to_have_text("Mailbox operator")
