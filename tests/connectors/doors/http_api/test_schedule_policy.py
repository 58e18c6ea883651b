"""The hub's rule about the number of schedules (DL-23)."""

from __future__ import annotations

import pytest

from connectors.operations.rules.hub_policy import evaluate_schedule_count
from schemas.streams.schedule.schedule_registry import ScheduleRow


@pytest.mark.requirement("DL-23")
def test_a_principal_may_have_a_thousand_active_schedules_and_replace_each_of_them():
    def schedules(count, owner):
        timing = {"cron": None, "every_s": 60}
        message = {"recipient": "bo", "kind": "k", "body": "{}", "content_type": "c", "priority": "normal"}
        more = {"from_task": None, "expires_in_ms": None, "missed": "skip", "revision": 1, "set_at": 1}
        return [
            ScheduleRow(f"s{n}", "active", owner, **timing, **message, **more, next_run_at=2)
            for n in range(count)
        ]

    assert evaluate_schedule_count([*schedules(999, "ann"), *schedules(5, "bo")], "ann", "new").allowed
    refused = evaluate_schedule_count(schedules(1000, "ann"), "ann", "new")
    assert (refused.allowed, refused.reason) == (False, "a principal may have 1000 active schedules")
    assert evaluate_schedule_count(schedules(1000, "ann"), "ann", "s7").allowed
    assert evaluate_schedule_count(schedules(1000, "ann"), "bo", "new").allowed
