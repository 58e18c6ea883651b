"""Spark after the log was made again from the ledger: it goes on at the ledger's end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from connectors.tools.audit.verification import verify
from connectors.tools.log_rebuild.log_rebuild import planned_ends
from connectors.tools.log_rebuild.rebuilt_topic import delete_topic
from jobs import settle_events
from jobs.build_views import catch_up
from jobs.settling.log_checks import StartRefused
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from tests.connectors.tools.log_rebuild.test_log_rebuild import made_anew, rebuild
from tests.jobs.conftest import Rows
from tests.jobs.test_lost_state import each_once
from tests.jobs.topic_load import append_all, event, registration

JOB = "0badcafe"


def plan_another_batch(settings: Settings, more: int) -> None:
    """Plan a micro-batch with `more` records of partition 0 in the checkpoint, as Spark does before it runs."""
    offsets = settings.state_path / "checkpoint" / "offsets"
    newest = max(int(file.name) for file in offsets.iterdir() if file.name.isdigit())
    version, options, source = (offsets / str(newest)).read_text().splitlines()
    ends = json.loads(source)
    ends[settings.kafka.topic]["0"] += more
    (offsets / str(newest + 1)).write_text("\n".join([version, options, json.dumps(ends)]))


@pytest.mark.requirement("OP-34")
def test_records_that_come_after_a_rebuild_are_settled_where_spark_had_planned_lost_ones(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    settings = backbone_settings
    append_all(settings, [registration(JOB, keyring), event(JOB, 1, "started"), event(JOB, 2)])
    before = drain()
    ends = {number: sum(row["partition"] == number for row in before) for number in range(4)}
    assert planned_ends(settings) == ends
    plan_another_batch(settings, 5)
    delete_topic(settings.kafka)
    plan, _ = rebuild(settings, keyring)
    assert plan.lost == {0: (ends[0], ends[0] + 5)}
    check_what_comes_next(settings, drain)


@pytest.mark.slow
@pytest.mark.requirement("OP-31")
def test_streams_refuse_a_log_that_was_made_anew_and_name_the_rebuild(
    spark: SparkSession,
    drain: Callable[[], Rows],
    backbone_settings: Settings,
    keyring: Keyring,
    tmp_path: Path,
) -> None:
    append_all(backbone_settings, [registration(JOB, keyring), event(JOB, 1, "started"), event(JOB, 2)])
    drain()
    catch_up(backbone_settings)
    made_anew(backbone_settings, tmp_path)
    with pytest.raises(StartRefused, match=r"'\./trunkline log rebuild' makes the log again"):
        settle_events.start(spark, backbone_settings)


@pytest.mark.slow
def test_the_streams_go_on_after_a_rebuild(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    append_all(backbone_settings, [registration(JOB, keyring), event(JOB, 1, "started"), event(JOB, 2)])
    drain()
    delete_topic(backbone_settings.kafka)
    plan, _ = rebuild(backbone_settings, keyring)
    assert plan.lost == {}
    check_what_comes_next(backbone_settings, drain)


def check_what_comes_next(settings: Settings, drain: Callable[[], Rows]) -> None:
    """Append the rest of the job, settle it, and check that the ledger has each record once and is true."""
    append_all(settings, [event(JOB, 3), event(JOB, 2), event(JOB, 4, "completed")])
    rows = drain()
    assert each_once(rows)
    of_the_job = [(row["seq"], row["verdict"]) for row in rows if row["stream_id"] == JOB and row["seq"]]
    accepted = [(seq, "accepted") for seq in (1, 2, 3)]
    assert of_the_job == [*accepted, (2, "duplicate"), (4, "accepted")]
    assert verify(settings, without_anchors=True).findings == ()
