"""The rules of all kinds of streams, by the name of the kind. A kind that is not here has none."""

from __future__ import annotations

from typing import Final

from schemas.effects.following import Follows, Timer
from schemas.effects.job_effects import JOB_FOLLOWS, SESSION_FOLLOWS, TASK_FOLLOWS
from schemas.effects.mailbox_effects import AGENT_FOLLOWS, MAILBOX_FOLLOWS, MESSAGE_TIMER
from schemas.effects.schedule_effects import SCHEDULE_FOLLOWS, SCHEDULE_TIMER
from schemas.effects.topic_effects import END_OF_MAILBOX, WEBHOOK_FOLLOWS
from trunkline_agent.wire.ids import AGENT, JOB, MAILBOX, PRINCIPAL, SCHEDULE, SESSION, TASK, WEBHOOK

FOLLOWS: Final[dict[str, tuple[Follows, ...]]] = {
    JOB: JOB_FOLLOWS,
    SESSION: SESSION_FOLLOWS,
    TASK: TASK_FOLLOWS,
    AGENT: AGENT_FOLLOWS,
    PRINCIPAL: (END_OF_MAILBOX,),
    WEBHOOK: WEBHOOK_FOLLOWS,
    SCHEDULE: SCHEDULE_FOLLOWS,
    MAILBOX: MAILBOX_FOLLOWS,
}
TIMERS: Final[dict[str, Timer]] = {MAILBOX: MESSAGE_TIMER, SCHEDULE: SCHEDULE_TIMER}
