"""`/metrics` of a running gateway: what was asked, what was settled, what waits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from connectors.log.log_end import LogEnd
from connectors.plumbing.machine.state_file import identity, write_state
from jobs import build_views
from schemas.settings.settings import PROJECT_ROOT
from schemas.tables.ledger import LEDGER
from tests.audited_ledger import AuditedLedger, ledger_row_at
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import add_principal


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


def lag_of(client, table):
    """Up, records that the table lacks, and seconds; None for a figure that is not there."""
    found = samples(client)
    records = [value for (name, *_), value in found.items() if name == f"trunkline_{table}_lag_records"]
    seconds = found.get((f"trunkline_{table}_lag_seconds",))
    return found[(f"trunkline_{table}_up",)], sum(records) if records else None, seconds


def check_documented(text):
    """The metrics are those of the documentation, and alert rules name no others."""
    named = re.compile(r"\b(?:trunkline|process)_[a-z_]+[a-z]")
    known = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    page = (PROJECT_ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(trunkline_[a-z_]+)`", page.partition("\n## ")[0]))
    ours = {name for name in known if name.startswith("trunkline_") and not name.endswith("_created")}
    assert ours == documented
    (group,) = yaml.safe_load((PROJECT_ROOT / "conf" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    used = {name for rule in group["rules"] for name in named.findall(rule["expr"])}
    assert used and used <= known
    assert all({"summary", "action"} == rule["annotations"].keys() for rule in group["rules"])


@pytest.mark.requirement("OP-21")
@pytest.mark.requirement("OP-22")
@pytest.mark.timeout(90)
def test_lag_of_ledger_and_views_is_counted_and_is_missing_while_they_cannot_be_read(
    gateway, operator, backbone_settings
):
    assert lag_of(operator, "ledger") == lag_of(operator, "view") == (0, None, None)
    add_principal(operator, "reader", "worker")
    ends = LogEnd(backbone_settings.kafka).offsets(10)
    ledger = AuditedLedger(backbone_settings.data_path, **dict(backbone_settings.audit))
    build_views.catch_up(backbone_settings)
    wait_until(lambda: lag_of(operator, "ledger")[:2] == (1, sum(ends.values())), 10, "nothing is settled")
    assert lag_of(operator, "view")[:2] == (1, sum(ends.values()))
    assert lag_of(operator, "ledger")[2] > 0
    ledger.commit(
        [ledger_row_at(p, at, entries=None) for p, end in ends.items() for at in range(end)], began=0.0
    )
    wait_until(lambda: lag_of(operator, "ledger") == (1, 0, 0), 10, "the ledger is at the log's end")
    assert lag_of(operator, "view")[1] == sum(ends.values())
    found = samples(operator)
    assert found[("trunkline_ledger_records_total",)] == sum(ends.values())
    assert found[("trunkline_settle_batch_records",)] == sum(ends.values())
    assert found[("trunkline_settle_batch_seconds",)] > 0
    assert found[("trunkline_ledger_commit_timestamp_seconds",)] > 1e9
    parts = {"streams": {"state": "ready", "restarts": 0}}
    write_state(backbone_settings, {"phase": "running", "supervisor": identity(), "parts": parts})
    wait_until(lambda: samples(operator)[("trunkline_mqtt_up",)] == 1, 10, "the broker answers")
    check_documented(operator.get("/metrics").text)
    build_views.catch_up(backbone_settings)
    wait_until(lambda: lag_of(operator, "view") == (1, 0, 0), 10, "the views are at the log's end")
    log = Path(backbone_settings.table_path(LEDGER), "_delta_log")
    (log / f"{len(list(log.glob('*.json'))):020d}.json").write_text("no JSON", encoding="utf-8")
    wait_until(lambda: lag_of(operator, "ledger") == (0, None, None), 10, "the ledger cannot be read")


@pytest.mark.requirement("OP-22")
def test_process_disk_and_parts_have_their_figures(gateway, operator, backbone_settings):
    found = samples(operator)
    assert found[("process_resident_memory_bytes",)] > 1e7
    assert 0 < found[("trunkline_data_dir_free_bytes",)] < found[("trunkline_data_dir_size_bytes",)]
    assert ("trunkline_supervisor_up",) not in found
    parts = {"streams": {"state": "waiting", "restarts": 3}, "bridge": {"state": "ready", "restarts": 0}}
    write_state(backbone_settings, {"phase": "running", "supervisor": identity(), "parts": parts})
    found = samples(operator)
    assert found[("trunkline_supervisor_up",)] == 1
    assert found["trunkline_part_restarts_total", "streams"] == 3
    states = ("starting", "ready", "unresponsive", "waiting", "stopped")
    for part, now in (("streams", "waiting"), ("bridge", "ready")):
        for state in states:
            key = ("trunkline_part_state", *sorted((part, state)))
            assert found[key] == (state == now)
    write_state(backbone_settings, {"phase": "running", "supervisor": {"pid": 0}, "parts": parts})
    found = samples(operator)
    assert found[("trunkline_supervisor_up",)] == 0
    assert not any(name == "trunkline_part_state" for name, *_ in found)


@pytest.mark.requirement("OP-22")
def test_the_active_bridge_is_seen_and_its_end(gateway, operator, backbone_settings, start_bridge):
    key = ("trunkline_bridge_state", backbone_settings.mqtt.bridge_client_id)
    wait_until(lambda: samples(operator).get(key) == 0, 10, "no bridge is there")
    bridge = start_bridge()
    wait_until(lambda: samples(operator).get(key) == 1, 10, "the bridge is active")
    bridge.process.kill()
    wait_until(lambda: samples(operator).get(key) == 0, 10, "the bridge has ended")


@pytest.mark.requirement("OP-41")
def test_polls_of_the_stacks_own_parts_are_counted_and_leave_the_access_log_to_real_requests(gateway, operator):
    lease = {"pump": "p", "wants": {}, "free": 0}
    for _ in range(20):
        for path in ("/api/hub/mqtt-agents", "/api/hub/brokers"):
            assert operator.get(path).status_code == 200
        assert operator.post("/api/hub/pump/lease", json=lease).status_code == 200
    assert operator.post("/api/hub/pump/lease", json={}).status_code == 400
    with gateway.client("canary") as stranger:
        assert stranger.get("/api/hub/brokers").status_code == 401
    assert operator.get("/api/hub/jobs").status_code == 200
    counted = samples(operator)
    for method, path in (("GET", "mqtt-agents"), ("GET", "brokers"), ("POST", "pump/lease")):
        assert counted["trunkline_http_requests_total", f"/api/hub/{path}", "200", method] >= 20

    def logged():
        lines = [json.loads(line) for line in gateway.program.log().splitlines() if '"request"' in line]
        return [(line["route"], line["status"]) for line in lines if line["event"] == "request"]

    wait_until(lambda: ("/api/hub/jobs", 200) in logged(), what="the line of the last request")
    polled = ("/api/hub/mqtt-agents", "/api/hub/brokers", "/api/hub/pump/lease")
    assert [line for line in logged() if line[0] in polled] == [
        ("/api/hub/pump/lease", 400),
        ("/api/hub/brokers", 401),
    ]
