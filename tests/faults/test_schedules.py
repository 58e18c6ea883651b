"""Runs that fall into a time without any gateway (DL-23): posted or left out, as each schedule says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas.settings.settings import Settings
from tests.broker_processes import wait_until
from tests.faults.killed_gateways import Gateways

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.requirement("DL-23")]

SCHEDULES = "/api/hub/schedules"
EVERY_S, GRACE_S, DOWN_S = 5, 60, 80
POLICIES = ("skip", "latest", "all")


@pytest.fixture
def gateways(backbone_settings: Settings, tmp_path: Path) -> Iterator[Gateways]:
    """Two gateways on one log."""
    found = Gateways(backbone_settings, tmp_path)
    yield found
    found.stop()


class Operator:
    """The operator at one of the gateways."""

    def __init__(self, gateways: Gateways, number: int = 0) -> None:
        self._url = gateways.settings[number].gateway_url
        self._headers = {"Authorization": f"Bearer {gateways.token}"}

    def ask(self, method: str, path: str, **more: Any) -> Any:
        """The answer to a request."""
        answer = httpx.request(method, self._url + path, headers=self._headers, timeout=30, **more)
        assert answer.is_success, answer.text
        return answer.json()

    def row(self, name: str) -> Any:
        """A schedule."""
        return self.ask("GET", f"{SCHEDULES}/{name}")

    def posted(self, kind: str) -> list[tuple[datetime, datetime]]:
        """The runs whose messages the operator has, with the times of the postings, in their order."""
        found = self.ask("GET", "/api/hub/mailboxes/default/operator", params={"limit": 1000})["messages"]
        mine = sorted((one for one in found if one["kind"] == kind), key=lambda one: moment(one["posted_at"]))
        return [(moment(one["sent_at"]), moment(one["posted_at"])) for one in mine]


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_after_a_time_without_gateways_missed_runs_are_posted_once_or_counted_as_each_schedule_says(
    gateways: Gateways,
) -> None:
    operator = Operator(gateways)
    first = {}
    for policy in POLICIES:
        body = {"recipient": "operator", "type": policy, "every_s": EVERY_S, "missed": policy}
        first[policy] = moment(operator.ask("POST", f"{SCHEDULES}/{policy}", json=body)["next_run_at"])
    body = {"recipient": "operator", "type": "cron", "cron": "* * * * *", "missed": "latest"}
    operator.ask("POST", f"{SCHEDULES}/cron", json=body)
    for policy in POLICIES:
        # Posted, too: a run that is recorded when the gateways end is not missed, and posted after that.
        wait_until(lambda policy=policy: len(operator.posted(policy)) >= 2, 30, f"runs of {policy}")
    gateways.end(0, 1)
    time.sleep(DOWN_S)
    gateways.start(0, 1)
    operator = Operator(gateways, 1)
    # Until all that was missed is behind, and some later runs, too.
    up_at = datetime.now(tz=first["all"].tzinfo)
    for name in (*POLICIES, "cron"):
        wait_until(
            lambda name=name: (
                moment(operator.row(name)["next_run_at"]) > up_at + timedelta(seconds=2 * EVERY_S)
            ),
            90,
            f"the runs of {name}",
        )
    rows = {}
    for name in (*POLICIES, "cron"):
        rows[name] = operator.ask("POST", f"{SCHEDULES}/{name}/remove", json={})
        count = rows[name]["runs"]
        wait_until(
            lambda name=name, count=count: len(operator.posted(name)) == count, 30, f"messages of {name}"
        )
    for policy in POLICIES:
        check_posted(policy, rows[policy], first[policy], operator.posted(policy))
    runs = [run for run, _ in operator.posted("cron")]
    assert runs == sorted(set(runs))
    assert {run.second for run in runs} == {0}


def check_posted(policy: str, row: Any, first: datetime, posted: list[tuple[datetime, datetime]]) -> None:
    """Check the messages of a schedule against the setting for missed runs."""
    runs, every = [run for run, _ in posted], timedelta(seconds=EVERY_S)
    last = moment(row["last_run_at"])
    expected = [first + number * every for number in range((last - first) // every + 1)]
    left_out = [run for run in expected if run not in runs]
    # In order, none twice, and each run is either posted or counted as missed.
    assert runs == [run for run in expected if run not in left_out]
    assert (row["runs"], row["missed_runs"]) == (len(runs), len(left_out))
    late = [posted_at - run for run, posted_at in posted]
    if policy == "all":
        assert left_out == []
        assert max(late) > timedelta(seconds=DOWN_S - 2 * EVERY_S)
    elif policy == "skip":
        # The grace is that of the record of the run, and the message is posted a moment later.
        assert 1 <= len(left_out) <= (DOWN_S - GRACE_S + 30) // EVERY_S
        assert max(late) < timedelta(seconds=GRACE_S + 10)
    else:
        assert len(left_out) >= DOWN_S // EVERY_S - 3
        assert max(late) < timedelta(seconds=EVERY_S + 10)
