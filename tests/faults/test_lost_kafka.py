"""Kafka's directory is lost under a whole stack: the log comes back from the ledger, and everything goes on."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from connectors.hub.live.live_view import LiveView
from connectors.programs.local_stack import LocalStack, free_port
from connectors.tools.audit.verification import verify
from schemas.effects.following import DOOR
from schemas.keys.sealing import ensure_keyring, load_keyring
from schemas.settings.settings import (
    AgentMcpSettings,
    DashboardSettings,
    GatewaySettings,
    KafkaSettings,
    Settings,
)
from tests.connectors.tools.log_rebuild.test_log_rebuild import rebuild
from tests.faults import backbone_states
from tests.faults.test_agreement import assert_the_check_finds_no_difference, look_after, wait_until_quiet
from tests.random_log import RandomLog
from tests.raw_records import append_raw
from trunkline_agent.errors import TrunklineError

PARTS = ("kafka", "gateway", "streams")
RECORDS = 600


def own_settings(tmp_path: Path) -> Settings:
    """A backbone without an MQTT door."""
    return Settings(
        data_dir=tmp_path / "stack",
        kafka=KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"),
        gateway=GatewaySettings(port=free_port()),
        dashboard=DashboardSettings(port=0),
        agent_mcp=AgentMcpSettings(port=0),
    )


def run_stack(settings: Settings, log: RandomLog, *, kill_at_the_end: bool) -> None:
    """Append records to the whole stack; compare its states, or kill all of it while it settles more."""
    with LocalStack(settings, parts=PARTS) as stack:
        keyring = load_keyring(settings)
        view = LiveView(settings, keyring)
        view.open()
        append_raw(settings, log.records(RECORDS))
        wait_until_quiet(stack, settings, view)
        tables = backbone_states.state_of_tables(settings)
        live = backbone_states.state_of_live_view(view, tables["entries"])
        if kill_at_the_end:
            append_raw(settings, log.records(RECORDS))
            look_after(stack, 0.5)
            for name in ("streams", "gateway", "kafka"):
                stack[name].kill()
        view.close()
    if not kill_at_the_end:
        refolded = backbone_states.state_of_refold(backbone_states.ledger_in_order(settings), keyring)
        assert backbone_states.differences(tables, refolded) == []
        assert backbone_states.differences(live, refolded) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.requirement("OP-34")
def test_a_stack_that_was_killed_and_has_lost_kafka_goes_on_after_a_rebuild(tmp_path: Path) -> None:
    settings = own_settings(tmp_path)
    log = RandomLog(20261125, ensure_keyring(settings))
    run_stack(settings, log, kill_at_the_end=True)
    before = backbone_states.ledger_in_order(settings)
    shutil.rmtree(settings.data_path / "kafka")
    with pytest.raises(TrunklineError, match="log rebuild"):
        LocalStack(settings, parts=PARTS).start()
    with LocalStack(settings, parts=("kafka",)):
        _, done = rebuild(settings, load_keyring(settings))
    assert done.written == before.num_rows
    run_stack(settings, log, kill_at_the_end=False)
    after = backbone_states.ledger_in_order(settings)
    rows = after.select(["partition", "offset", "door", "verdict", "ce_id", "stream_id"]).to_pylist()
    positions = {(row["partition"], row["offset"]) for row in rows}
    assert len(positions) == len(rows) > before.num_rows + RECORDS
    derived = [row for row in rows if row["door"] == DOOR and row["verdict"] == "accepted"]
    times = Counter((row["stream_id"], row["ce_id"]) for row in derived)
    assert set(times.values()) == {1}, "a derived record counts twice"
    assert_the_check_finds_no_difference(settings)
    assert verify(settings).findings == ()
