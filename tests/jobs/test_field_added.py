"""A field is added to the wire model under load: old and new senders, of the same jobs, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from deltalake import DeltaTable

from jobs.build_views import catch_up
from jobs.refold import check_views
from schemas.job_event import JobEvent
from schemas.ledger import LEDGER
from schemas.sealing import Keyring
from schemas.settings import Settings
from schemas.signing import sign_event
from schemas.strict_json import canonical
from schemas.view_rows import REGISTRY_JOBS
from tests.jobs.conftest import Rows
from tests.jobs.topic_load import SECRET, append_all, registration
from tests.mqtt_wire import publish_all

JOBS = [f"{number:08x}" for number in range(10)]
EVENTS = 40


class NewerJobEvent(JobEvent):
    """The wire model of a later version."""

    cost_eur: float
    model: dict[str, str]


def sent_by(version: type[JobEvent], seqs: range) -> Iterator[tuple[str, bytes]]:
    """What a sender that has this wire model publishes of all jobs: topic and bytes, in order."""
    added: dict[str, Any] = {"cost_eur": 0.25, "model": {"name": "small"}} if version is NewerJobEvent else {}
    for seq in seqs:
        for job in JOBS:
            event = version(
                schema_version=1,
                seq=seq,
                job_id=job,
                event="progress",
                timestamp="2026-11-21T10:00:00Z",
                detail="going on",
                data={},
                **added,
            )
            yield f"{job}/events", canonical(sign_event(event.model_dump(), SECRET))


@pytest.mark.requirement("JE-02")
@pytest.mark.timeout(180)
def test_old_and_new_senders_of_the_same_jobs_are_accepted_and_what_is_new_is_kept(
    start_bridge: Callable[..., Any], drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    start_bridge()
    append_all(backbone_settings, [registration(job, keyring) for job in JOBS])
    old = list(sent_by(JobEvent, range(1, EVENTS, 2)))
    new = list(sent_by(NewerJobEvent, range(2, EVENTS + 1, 2)))
    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(publish_all, backbone_settings.mqtt, some) for some in (old, new)]
        drain()  # some of it while it comes
        for done in sending:
            done.result()
    for _ in range(20):
        events = [row for row in drain() if row["type"] == "job.event"]
        if len(events) >= len(old) + len(new):
            break
    assert {row["verdict"] for row in events} == {"accepted"}
    assert sorted(row["value"] for row in events) == sorted(value for _, value in old + new)
    newer = [json.loads(row["value"]) for row in events if row["seq"] % 2 == 0]
    assert {event["cost_eur"] for event in newer} == {0.25}
    catch_up(backbone_settings)
    jobs = DeltaTable(backbone_settings.table_path(REGISTRY_JOBS)).to_pyarrow_table().to_pylist()
    assert {(row["job_id"], row["last_seq"]) for row in jobs} == {(job, EVENTS) for job in JOBS}
    check = check_views(backbone_settings, DeltaTable(backbone_settings.table_path(LEDGER)), keyring)
    assert (check.differences, check.newer) == ([], 0)
