"""Retained ends of jobs at the stack's own Mosquitto go when the job's account goes, and no other one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connectors.doors.mqtt_accounts import retained_ends
from connectors.doors.mqtt_accounts.retained_ends import RetainedEnds
from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, role_mqtt
from connectors.programs.local_stack import LocalStack
from schemas.settings.settings import Settings
from tests.broker_processes import wait_until, with_mqtt
from tests.connectors.folded_jobs import FoldedJobs
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.mqtt_wire import listening, publish_all

pytestmark = [pytest.mark.requirement("JE-34"), pytest.mark.mosquitto]
GRACE_S = 60


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    folder = tmp_path_factory.mktemp("retained") / "data"
    with LocalStack(with_mqtt(settings_in(folder), account_grace_s=GRACE_S), ("mosquitto",)) as stack:
        yield stack.settings


def retain(settings: Settings, jobs: list[str]) -> None:
    publish_all(role_mqtt(settings, OPERATOR), [(f"{job}/events", b"completed") for job in jobs], retain=True)


def retained(settings: Settings) -> set[str]:
    """The jobs of which a subscriber who comes now gets an end."""
    operator = role_mqtt(settings, OPERATOR)
    with listening(operator, "#") as found:
        publish_all(operator, [("bridge/marker", b"last")])
        wait_until(lambda: any(one.payload == b"last" for one in found), what="all retained messages")
        return {one.topic.split("/")[-2] for one in found if one.retain}


def ended(jobs: FoldedJobs, ago_s: float) -> str:
    job, _ = jobs.register()
    jobs.end(job, ago_s=ago_s)
    return job


def test_ends_of_long_ago_are_removed_and_those_with_an_account_stay(settings: Settings) -> None:
    jobs = FoldedJobs()
    old = [ended(jobs, GRACE_S + 1) for _ in range(20)]
    fresh, (live, _), unknown = ended(jobs, GRACE_S / 2), jobs.register(), "ffffffff"
    retain(settings, [*old, fresh, live, unknown])
    ends = RetainedEnds(settings, jobs)
    operator = role_mqtt(settings, OPERATOR)
    with listening(operator, "+/events") as found:
        wait_until(lambda: len(found) == 23, what="all that are retained")
        assert ends.remove_old() == 20
        wait_until(lambda: len(found) == 43, what="the removals")
    assert {one.payload for one in found[23:]} == {b""}
    assert retained(settings) == {fresh, live, unknown}
    assert ends.remove_old() == 0


def test_after_many_removals_the_rest_follows_at_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = FoldedJobs()
    old = {ended(jobs, GRACE_S + 1) for _ in range(30)}
    retain(settings, sorted(old))
    monkeypatch.setattr(retained_ends, "_REMOVED_MOST", 7)
    service = RetainedEnds(settings, jobs)  # it looks every 6 s otherwise
    service.open()
    try:
        wait_until(lambda: not retained(settings) & old, 10, "all are removed")
    finally:
        service.close()
