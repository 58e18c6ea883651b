"""`trunkline webhooks` as a user runs it, against a real gateway, and what `doctor` says of them (WH-05)."""

from __future__ import annotations

import pytest

from connectors.cli.doctor.gateway import webhooks_finding as finding_of
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from tests.connectors.cli.conftest import CommandLine

pytestmark = pytest.mark.requirement("WH-05")


def test_a_webhook_is_set_listed_paused_resumed_tested_and_removed(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    done = trunkline.call("webhooks", "set", "operator", "https://localhost:1/inbox")
    assert (done.returncode, done.stderr) == (0, "")
    first, secret, note = done.stdout.splitlines()
    assert first == "webhook operator calls https://localhost:1/inbox"
    assert secret.startswith("secret: whsec_")
    assert note == "It is shown this once. Keep it."
    assert trunkline.json("webhooks", "set", "operator", "https://localhost:1/", "--overlap", "1d")["secret"]
    row = trunkline.json("webhooks", "show", "operator")
    assert (row["status"], row["revision"], "secret" in row) == ("active", 2, False)
    table = trunkline.call("webhooks", "list").stdout.splitlines()
    assert table[1].split()[:3] == ["operator", "active", "https://localhost:1/"]
    done = trunkline.call("webhooks", "test", "operator")
    assert done.returncode == 1
    assert done.stdout.startswith("failed: its address is private or reserved (webhooks.allow_networks)")
    assert trunkline.call("webhooks", "pause", "operator", "--reason", "moving").returncode == 0
    assert trunkline.json("webhooks", "show", "operator")["why_paused"] == "moving"
    done = trunkline.call("webhooks", "resume", "operator")
    assert (done.returncode, done.stdout) == (0, "webhook operator is active\n")
    assert trunkline.call("webhooks", "remove", "operator").returncode == 0
    assert trunkline.call("webhooks", "list").returncode == 3
    assert trunkline.call("webhooks", "set", "nobody", "https://example.org/").returncode == 3
    refused = trunkline.call("webhooks", "set", "operator", "http://example.org/")
    assert (refused.returncode, "webhooks.allow_http" in refused.stderr) == (4, True)


def test_doctor_warns_of_paused_failing_and_dead_and_names_the_first_three() -> None:
    def one(name: str, **changed: object) -> dict[str, object]:
        row = {"status": "active", "why_paused": None, "failures_in_a_row": 0, "last_failure": None, "dead": 0}
        return {"webhook": name, **row, **changed}

    assert finding_of([]).level == "ok"
    assert finding_of([one("ann")]).level == "ok"
    faults = [
        one("ann", status="paused", why_paused="the address answered 410 Gone"),
        one("bo", failures_in_a_row=4, last_failure="HTTP status 500"),
        one("cy", dead=2),
        one("di", dead=1),
        one("ed"),
    ]
    found = finding_of(faults)
    assert found.level == "warn"
    assert found.found == (
        "ann is paused: the address answered 410 Gone; bo has failed 4 times: HTTP status 500; "
        "cy has 2 dead messages, and 1 more"
    )
