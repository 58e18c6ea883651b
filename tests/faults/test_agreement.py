"""The two runners agree: live views, view tables and a refold of the ledger's bytes are equal at one offset.

The most important test of the project. The log is random, with every kind of trouble; gateway and Spark are
killed and started again while it grows.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from connectors.hub.live.live_view import LiveView
from connectors.programs.local_stack import LocalStack, free_port
from jobs.driver.programs import WriterClaim
from jobs.rebuild_views import rebuild
from jobs.refold import check_views
from schemas.keys.sealing import Keyring, load_keyring
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import AgentMcpSettings, DashboardSettings, Settings
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import read_progress
from tests.broker_processes import BrokerProcess, wait_until
from tests.faults import backbone_states, mailbox_states
from tests.own_settings import own_settings
from tests.random_log import RandomLog
from tests.raw_records import append_raw

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]

PARTS = ("gateway", "streams")
QUIET_WITHIN_S = 120.0
QUIET_S = 2.0
JOBS_SHOWN = 1000


@dataclass
class Backbone:
    """Gateway and streams at work on a random log, and a live view that is there from the beginning."""

    stack: LocalStack
    settings: Settings
    keyring: Keyring
    log: RandomLog
    steady: LiveView
    # The ledger's version when the streams were killed.
    killed_at: int = 0

    def wait_ready(self, *names: str, restarts: int = 0) -> None:
        """Wait until these parts are there, after so many starts again of each."""

        def are_ready() -> bool:
            look_after(self.stack, 0.1)
            return all((self.stack[n].state, self.stack[n].restarts) == ("ready", restarts) for n in names)

        wait_until(are_ready, QUIET_WITHIN_S, f"{names}, started again {restarts} times")

    def wait_settled(self, version: int) -> None:
        """Wait until the streams have committed something after this version of the ledger."""
        ledger = DeltaTable(self.settings.table_path(LEDGER))

        def is_newer() -> bool:
            look_after(self.stack, 0.1)
            ledger.update_incremental()
            return ledger.version() > version

        wait_until(is_newer, QUIET_WITHIN_S, f"a commit after version {version} of the ledger")

    def grow(self, records: int, killed: str) -> None:
        """Append so many records, kill a part, and look after it for a moment."""
        append_raw(self.settings, self.log.records(records))
        self.stack[killed].kill()
        if killed == "streams":
            self.killed_at = DeltaTable(self.settings.table_path(LEDGER)).version()
        look_after(self.stack, 2)


@contextmanager
def backbone_at_work(
    kafka: BrokerProcess, mosquitto: BrokerProcess, folder: Path, seed: int
) -> Iterator[Backbone]:
    """Start the two parts on a topic of their own, and wait for the gateway alone, which is the quicker one."""
    settings = own_settings(kafka, mosquitto, folder)
    closed = {"dashboard": DashboardSettings(port=0), "agent_mcp": AgentMcpSettings(port=0)}
    gateway = settings.gateway.model_copy(update={"port": free_port()})
    settings = settings.model_copy(update={"gateway": gateway, **closed})
    keyring = load_keyring(settings)
    stack = LocalStack(settings, parts=PARTS)
    try:
        stack.start(should_stop=lambda: stack["gateway"].is_ready)
        steady = LiveView(settings, keyring)
        steady.open()
        try:
            yield Backbone(stack, settings, keyring, RandomLog(seed, keyring), steady)
        finally:
            steady.close()
    finally:
        stack.stop()


def end_offsets(settings: Settings) -> dict[int, int]:
    """Return the log's end per partition."""
    with topic_reader(settings.kafka) as consumer:
        ends = consumer.end_offsets(sorted(consumer.assignment()))
    return {where.partition: end for where, end in ends.items()}


def look_after(stack: LocalStack, seconds: float) -> None:
    """Supervise the stack for a while, as its supervisor does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stack.look_after()
        time.sleep(0.1)


def views_are_at(settings: Settings, ends: dict[int, int]) -> bool:
    """True if the view tables hold all that lies below `ends`."""
    if not DeltaTable.is_deltatable(settings.table_path(STREAM_ENTRIES)):
        return False
    offsets = read_progress(DeltaTable(settings.table_path(STREAM_ENTRIES))).offsets
    return all(offsets.get(partition, 0) >= end for partition, end in ends.items())


def wait_until_quiet(stack: LocalStack, settings: Settings, steady: LiveView) -> None:
    """Wait until the reactor adds nothing more, and ledger, views and live view are at the log's end."""
    deadline = time.monotonic() + QUIET_WITHIN_S
    before, since = dict[int, int](), time.monotonic()
    while time.monotonic() < deadline:
        look_after(stack, 0.3)
        if (ends := end_offsets(settings)) != before:
            before, since = ends, time.monotonic()
        up = all(part.state == "ready" for part in stack.parts.values())
        live = all(steady.next_offsets().get(p, 0) >= end for p, end in ends.items())
        if time.monotonic() - since > QUIET_S and up and live and views_are_at(settings, ends):
            return
    pytest.fail(f"not quiet within {QUIET_WITHIN_S} s: log at {before}, live view at {steady.next_offsets()}")


def job_rows_of_gateway(settings: Settings) -> dict[str, str]:
    """Status by job id, as the gateway answers."""
    token = settings.operator_token_file.read_text().strip()
    answer = httpx.get(
        f"{settings.gateway_url}/api/hub/jobs?limit={JOBS_SHOWN}",
        headers={"Authorization": f"Bearer {token}"},
        timeout=20,
    )
    return {row["job_id"]: row["status"] for row in answer.json()["jobs"]}


def wait_gateway_agrees(settings: Settings, statuses: dict[str, str]) -> None:
    """Wait until the gateway shows these jobs. Its view is its own, and comes to the log's end when it does."""

    def agrees() -> bool:
        found = job_rows_of_gateway(settings)
        return len(found) == min(JOBS_SHOWN, len(statuses)) and found.items() <= statuses.items()

    wait_until(agrees, 30, "the gateway shows the jobs of the tables")


class States(NamedTuple):
    """The backbone's state at one end of the log, by each that holds it, and a refold of the ledger's bytes."""

    tables: backbone_states.State
    live: list[backbone_states.State]
    jobs: dict[str, str]
    ledger: pa.Table
    refolded: backbone_states.State


def states_of(backbone: Backbone) -> States:
    """Wait until it is quiet and ask all of them, a live view that has just started among them."""
    settings, keyring = backbone.settings, backbone.keyring
    wait_until_quiet(backbone.stack, settings, backbone.steady)
    restarted = LiveView(settings, keyring)
    restarted.open()
    try:
        tables = backbone_states.state_of_tables(settings)
        streams = tables["entries"].keys() | {f"job/{job_id}" for job_id in tables["rows"][REGISTRY_JOBS]}
        live = [backbone_states.state_of_live_view(view, streams) for view in (backbone.steady, restarted)]
    finally:
        restarted.close()
    rows = tables["rows"][REGISTRY_JOBS]
    wait_gateway_agrees(settings, {job_id: row["status"] for job_id, (_, row) in rows.items()})
    jobs = job_rows_of_gateway(settings)
    ledger = backbone_states.ledger_in_order(settings)
    return States(tables, live, jobs, ledger, backbone_states.state_of_refold(ledger, keyring))


def assert_they_agree(states: States, records: int) -> None:
    """Nothing is lost or there twice, and all show the same."""
    tables, live, jobs, ledger, refolded = states
    assert ledger.num_rows >= records
    positions = {
        (row["partition"], row["offset"]) for row in ledger.select(["partition", "offset"]).to_pylist()
    }
    assert len(positions) == ledger.num_rows, "a record has two rows"
    assert backbone_states.differences(tables, refolded) == []
    assert backbone_states.differences(live[0], refolded) == []
    assert backbone_states.differences(live[1], refolded) == []
    rows = refolded["rows"][REGISTRY_JOBS]
    assert jobs.items() <= {job_id: row["status"] for job_id, (_, row) in rows.items()}.items()
    assert len(jobs) == min(JOBS_SHOWN, len(rows))


def assert_the_mailboxes_are_as_the_model_says(states: States, keyring: Keyring) -> None:
    """Spark's verdict on each record about a message, and the rows in the end, are those of a plain model."""
    found = mailbox_states.differences_to_the_model(states.ledger, states.tables, keyring)
    assert found == []


def assert_the_check_finds_no_difference(settings: Settings) -> None:
    """Refold the ledger and compare the views with it."""
    found = check_views(settings, DeltaTable(settings.table_path(LEDGER)), load_keyring(settings))
    assert (found.differences, found.newer) == ([], 0)


def assert_a_rebuild_brings_the_views_back(settings: Settings, refolded: backbone_states.State) -> None:
    """Check the views, delete them, build them anew, and check them again."""
    assert_the_check_finds_no_difference(settings)
    for table in VIEW_TABLES:
        shutil.rmtree(settings.table_path(table))
    with WriterClaim(settings):
        rebuild(settings)
    assert backbone_states.differences(backbone_states.state_of_tables(settings), refolded) == []
    assert_the_check_finds_no_difference(settings)


RECORDS = 1_200


@pytest.fixture(scope="module")
def backbone(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backbone]:
    """Gateway and streams, for all tests of the file. Each of the next fixtures goes a step on with it."""
    folder = tmp_path_factory.mktemp("agreement")
    with backbone_at_work(kafka_broker, mosquitto_broker, folder, seed=20261122) as found:
        yield found


@pytest.fixture(scope="module")
def killed(backbone: Backbone) -> Backbone:
    """Half of the records and a kill of the streams, then the rest and a kill of the gateway."""
    backbone.wait_ready(*PARTS)
    backbone.grow(RECORDS // 2, "streams")
    backbone.grow(RECORDS // 2, "gateway")
    return backbone


@pytest.fixture(scope="module")
def states(killed: Backbone) -> States:
    """All states at the log's end. Gateway and streams have ended then, and nobody else writes the tables."""
    found = states_of(killed)
    killed.stack.stop()
    return found


def test_the_gateway_does_not_wait_for_the_streams(backbone: Backbone) -> None:
    assert backbone.stack["gateway"].state == "ready"


def test_streams_that_start_make_the_ledger(backbone: Backbone) -> None:
    path = backbone.settings.table_path(LEDGER)
    wait_until(lambda: DeltaTable.is_deltatable(path), QUIET_WITHIN_S, "the ledger")


def test_streams_that_start_settle_what_is_there(backbone: Backbone) -> None:
    backbone.wait_settled(0)


def test_gateway_and_streams_are_ready(backbone: Backbone) -> None:
    backbone.wait_ready(*PARTS)


def test_a_killed_gateway_is_started_again(killed: Backbone) -> None:
    killed.wait_ready("gateway", restarts=1)


def test_killed_streams_go_on_settling(killed: Backbone) -> None:
    killed.wait_settled(killed.killed_at)


def test_killed_streams_are_started_again(killed: Backbone) -> None:
    killed.wait_ready("streams", restarts=1)


@pytest.mark.requirement("JE-09")
def test_live_views_tables_and_a_refold_agree_after_trouble_and_kills(states: States) -> None:
    assert_they_agree(states, RECORDS)


@pytest.mark.requirement("JE-09")
def test_views_that_are_built_anew_are_equal_after_trouble_and_kills(
    backbone: Backbone, states: States
) -> None:
    assert_a_rebuild_brings_the_views_back(backbone.settings, states.refolded)


@pytest.mark.requirement("JE-09")
@pytest.mark.requirement("DL-03")
@pytest.mark.requirement("DL-05")
def test_ledger_and_tables_of_mailboxes_are_as_a_plain_model_says_after_trouble_and_kills(
    backbone: Backbone, states: States
) -> None:
    assert_the_mailboxes_are_as_the_model_says(states, backbone.keyring)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_they_agree_after_twenty_thousand_records_and_ten_kills(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path: Path
) -> None:
    with backbone_at_work(kafka_broker, mosquitto_broker, tmp_path, seed=20261123) as backbone:
        backbone.wait_ready(*PARTS)
        for number in range(10):
            backbone.grow(2_000, PARTS[number % 2])
        states = states_of(backbone)
    assert_they_agree(states, 20_000)
    assert_the_mailboxes_are_as_the_model_says(states, backbone.keyring)
    assert_a_rebuild_brings_the_views_back(backbone.settings, states.refolded)
