"""`library_program.py` with the named crash points of `crash_points.py` in the library, put there from outside.

    python -P -m tests.faults.prove.crashing_library agent|job CONFIG

For the test of the checks, TRUNKLINE_PROVE_BUG names bugs to plant in the library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

from tests.faults.prove import library_program
from tests.faults.prove.crash_points import Points
from tests.faults.prove.schedule import ACKED, LIBRARY, NOT_ACKED, NOT_CONFIRMED, TAKEN, WRITTEN
from trunkline_agent.agent import Agent
from trunkline_agent.jobs.http_delivery import HubDelivery
from trunkline_agent.mqtt.event_delivery import DeliveryConnection
from trunkline_agent.outbox.outbox import JobOutbox, PendingEvent

BUG_VARIABLE: Final = "TRUNKLINE_PROVE_BUG"
ACKS_FIRST, WRITES_NOTHING = "acks_first", "writes_nothing"


def install_agent_points(points: Points) -> None:
    """When a message was taken, when all was sent and it is not acknowledged, and when it is."""
    reply, ack = Agent.reply, Agent.ack

    def replying(agent: Agent, *arguments: Any, **named: Any) -> Any:
        points.hit(TAKEN)
        return reply(agent, *arguments, **named)

    def acknowledging(agent: Agent, message: Any) -> None:
        points.hit(NOT_ACKED)
        ack(agent, message)
        points.hit(ACKED)

    Agent.reply, Agent.ack = replying, acknowledging  # type: ignore[method-assign]


def install_job_points(points: Points) -> None:
    """When an event is in the outbox and was not sent, and when it was settled and is still in the outbox."""
    settled, send, add = HubDelivery._settled, DeliveryConnection.send, JobOutbox.add

    def adding(outbox: JobOutbox, event: str, build: Callable[[int], bytes]) -> PendingEvent:
        found = add(outbox, event, build)
        points.hit(WRITTEN)
        return found

    def settling(delivery: HubDelivery, *arguments: Any) -> Any:
        found = settled(delivery, *arguments)
        points.hit(NOT_CONFIRMED)
        return found

    def sending(connection: DeliveryConnection, pending: PendingEvent) -> Any:
        found = send(connection, pending)
        points.hit(NOT_CONFIRMED)
        return found

    JobOutbox.add, HubDelivery._settled = adding, settling  # type: ignore[method-assign]
    DeliveryConnection.send = sending  # type: ignore[method-assign]


def plant(bug: str) -> None:
    """Put a bug into the library."""
    if bug == ACKS_FIRST:
        receive = Agent.receive

        def receiving(agent: Agent, **named: Any) -> Any:
            message = receive(agent, **named)
            if message is not None:
                message.ack()
            return message

        Agent.receive = receiving  # type: ignore[method-assign]
    elif bug == WRITES_NOTHING:
        append = JobOutbox._append

        def appending(outbox: JobOutbox, make: Callable[[int], PendingEvent]) -> PendingEvent:
            """Keep the number alone on disk."""
            message = append(outbox, make)
            pending, outbox._state.outbox = outbox._state.outbox, []
            outbox._save()
            outbox._state.outbox = pending
            return message

        JobOutbox._append = appending  # type: ignore[method-assign]


if __name__ == "__main__":
    its = Points(LIBRARY)
    for planted in os.environ.get(BUG_VARIABLE, "").split():
        plant(planted)
    install_agent_points(its)
    install_job_points(its)
    library_program.main(sys.argv[1], sys.argv[2])
