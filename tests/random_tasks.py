"""Random records about tasks, their tokens and containers, and about definitions of agents."""

from __future__ import annotations

import random
from typing import Any

from schemas.streams.agents import agent_registry as agents
from schemas.streams.container.containers import CONTAINER_STATES, ContainerChange
from schemas.streams.task import task_registry as tasks
from schemas.wire.record import OutgoingRecord

_BY: Any = {"door": "http", "principal": "operator"}


def task_or_agent_record(draw: random.Random) -> OutgoingRecord:
    """One record about one of few tasks, containers or agents."""
    roll, agent = draw.random(), f"agent-{draw.randrange(4)}"
    if roll < 0.7:
        return _task_body(draw, agent).record(**_BY)
    if roll < 0.85:
        change = ContainerChange(
            container=f"container-{draw.randrange(12)}",
            # Mostly one of the first, so that some get through their life.
            state=draw.choice([*CONTAINER_STATES, *CONTAINER_STATES[:4]]),
            task_id=f"task-{draw.randrange(30)}",
            agent_name=agent,
            backend="process",
            launcher="here",
            port=draw.choice([None, 8080]),
            error=draw.choice([None, "no disk"]),
        )
        return change.record(**_BY)
    cause = str(draw.randrange(5))
    if roll < 0.9:
        return agents.AgentRemoved(agent_name=agent).record(cause=cause, **_BY)
    definition = agents.AgentDefined(
        agent_name=agent,
        image="an/image",
        description=draw.choice(["reads", "writes"]),
        capabilities=["message.send"],
        hardened=draw.random() < 0.5,
    )
    return definition.record(cause=cause, **_BY)


def _task_body(draw: random.Random, agent: str) -> Any:
    number = draw.randrange(30)
    about = {"task_id": f"task-{number}", "request_id": f"request-{draw.randrange(300)}"}
    token = f"{number:02x}" * 32
    return draw.choice(
        [
            tasks.TaskCreation(**about, description="count the stars", agent_name=agent),
            tasks.TaskStart(
                **about,
                description="count the stars",
                agent_name=agent,
                capabilities=["message.send"],
                token_sha256=token,
                expiry_ms=60_000,
            ),
            tasks.TaskCompletion(**about, result=draw.choice(["42", '{"n": 1}'])),
            tasks.TaskFailure(**about, error="no stars"),
            tasks.TaskCancellation(**about, reason=draw.choice(["", "no longer needed"])),
            tasks.TokenRevocation(**about, token_id=tasks.token_id_of(token), reason="lost"),
        ]
    )
