"""Random records of schedules, for the random log: requests of several principals, and runs not due yet."""

from __future__ import annotations

import random

from schemas.streams.schedule import schedule_registry as schedules
from schemas.wire.record import OutgoingRecord

# No run is due while the log is written, or gateways that follow the log would append records of their own.
_TIMINGS = ({"every_s": 86_400}, {"every_s": 31_536_000}, {"cron": "0 0 29 2 *"}, {"cron": "0 0 */16 1 1#3"})
_NEW_YEAR_2028_US = 1_830_297_600_000_000


def schedule_record(draw: random.Random) -> OutgoingRecord:
    """Return one record about one of few schedules."""
    roll, name = draw.random(), f"schedule-{draw.randrange(6)}"
    by = {"door": "http", "principal": draw.choice(["ann", "ann", "bob"])}
    request = {
        "name": name,
        "request_id": f"request-{draw.randrange(300)}",
        "takes_over": draw.choice([None, None, None, True]),
    }
    message = {"recipient": "worker-1", "kind": "ask", "body": draw.choice(['{"n": 1}', "plain text", "☃"])}
    if roll < 0.6:
        more = {
            "missed": draw.choice(["skip", "latest", "all"]),
            "priority": draw.choice(["low", "normal", "high"]),
            "expires_in_ms": draw.choice([None, 60_000]),
            "from_task": draw.choice([None, None, "task-1"]),
        }
        timing = draw.choice(_TIMINGS)
        body = schedules.ScheduleSet.model_validate({**request, **timing, **message, **more})
        return body.record(**by)
    if roll < 0.8:
        return schedules.ScheduleRemoved.model_validate(request).record(**by)
    run = {"name": name, "revision": draw.choice([1, 2, 3]), "run_at": _NEW_YEAR_2028_US}
    made = schedules.ScheduleMissed.model_validate(run)
    if roll < 0.9:
        fields = {"sender": "ann", "content_type": "application/json", "priority": "normal", **message}
        made = schedules.ScheduleRan.model_validate({**run, **fields})
    elif roll < 0.92:
        run["run_at"] = 0
        made = schedules.ScheduleRefused.model_validate({**run, "reason": "mailbox_full"})
    return made.record(door="reactor", principal="reactor")
