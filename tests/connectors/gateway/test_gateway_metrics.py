"""`/metrics` of a running gateway: what was asked, what was settled, what waits."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.broker_processes import wait_until
from tests.connectors.gateway.hub_access import add_principal


def samples(client):
    """Name and labels to value."""
    text = client.get("/metrics").text
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.requirement("HH-13")
def test_requests_verdicts_lag_and_depth_are_counted(gateway, operator):
    add_principal(operator, "reader", "worker")
    before = samples(operator)
    for number in range(3):
        sent = {"recipient": "reader", "type": "ask", "payload": number}
        assert operator.post("/api/hub/messages", json=sent).status_code == 200
    assert operator.post("/api/hub/messages", json={"recipient": "no-one", "type": "ask"}).status_code == 404
    after = samples(operator)

    def rise(*key):
        return after.get(key, 0) - before.get(key, 0)

    assert rise("trunkline_http_requests_total", "/api/hub/messages", "200", "POST") == 3
    assert rise("trunkline_http_requests_total", "/api/hub/messages", "404", "POST") == 1
    assert rise("trunkline_http_request_seconds_count", "/api/hub/messages") == 4
    assert rise("trunkline_verdicts_total", "", "accepted") >= 3
    assert after["trunkline_mailbox_depth", "default/reader"] == 3
    assert after[("trunkline_mailbox_messages",)] >= 3
    assert {key[0] for key in after} >= {"trunkline_live_view_lag_records"}
    key = ("trunkline_verdicts_total", "rejected", "unknown_recipient")
    wait_until(lambda: samples(operator).get(key, 0) > before.get(key, 0), 10, "the refusal is settled, too")


@pytest.mark.requirement("HH-13")
def test_what_a_stranger_asks_for_becomes_no_label(gateway, operator):
    operator.get("/api/hub/canary-1234")
    operator.request("CANARY", "/api/hub/jobs")
    assert "canary" not in operator.get("/metrics").text.lower()
