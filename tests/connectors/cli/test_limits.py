"""`trunkline principals limit` against a real gateway (LM-02)."""

from __future__ import annotations

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from tests.connectors.cli.conftest import CommandLine


@pytest.mark.requirement("LM-02")
@pytest.mark.requirement("LM-04")
def test_limits_are_set_listed_and_lifted(hub: GatewayClient, trunkline: CommandLine) -> None:
    hub.post(path_of("principals"), {"principal": "dee", "role": "worker"})
    done = trunkline.call("principals", "limit", "name", "dee", "--pending", "1", "--per-minute", "60")
    assert done.returncode == 0
    assert "limits of name dee: pending_most 1, messages_per_minute 60" in done.stdout
    assert trunkline.json("principals", "limit", "all", "--pending", "50000")["pending_most"] == 50_000
    both = trunkline.call("principals", "limit", "role", "worker", "--jobs", "7", "--topics", "3")
    assert "limits of role worker: live_jobs_most 7, subscriptions_most 3" in both.stdout
    rows = trunkline.json("principals", "limits")["limits"]
    assert [(row["scope"], row["name"]) for row in rows] == [
        ("all", "all"),
        ("role", "worker"),
        ("name", "dee"),
    ]
    assert "dee" in trunkline.call("principals", "limits").stdout
    to = ("messages", "send", "dee", "note")
    assert trunkline.call(*to).returncode == 0
    full = trunkline.call(*to)
    assert full.returncode == 4 and "mailbox_full" in full.stderr and "try again in 1 s" in full.stderr
    assert trunkline.call("principals", "limit", "name", "dee").returncode == 0
    assert trunkline.call(*to).returncode == 0
    assert trunkline.call("principals", "limit", "name").returncode == 2
    assert trunkline.call("principals", "limit", "role", "kings").returncode == 2
