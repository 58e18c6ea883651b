"""The demo's scene at the hub: two sample agents, real processes, talk through it. One completes its task by a
message, the other is killed in the middle, and its task fails by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.gateway_client.operator_token import ensure_operator_token
from connectors.samples.hub_agent import FINISH, GREET
from schemas.fold import life_cycles as states
from schemas.settings.settings import Settings

# As conf/agents defines them.
ECHO: Final = "echo"
FLAKY: Final = "flaky"
_POLL_S: Final = 0.2
_AGENT_S: Final = 30.0


class HubScene:
    """What the demo asks of the hub, as the operator. `told`: a line on how each task ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # A task whose process is gone fails after two looks at most.
        self._ends_within_s = _AGENT_S + 2 * settings.gateway.task_check_s
        self.told: list[str] = []

    def play(self, tick: Callable[[], None]) -> list[str]:
        """Play the scene; returns what went otherwise than planned. `tick` is called a few times a second."""
        with self._client() as hub:
            defined = {agent["name"] for agent in hub.get(path_of("agents"))["agents"]}
            if not {ECHO, FLAKY} <= defined:
                # A stack that stays may have agents of its own alone.
                return []
            tasks = {
                name: hub.post(path_of("tasks"), {"agent_name": name, "description": what})["task"]["id"]
                for name, what in ((ECHO, "greet a colleague"), (FLAKY, "answer once, then crash"))
            }
            hub.post(path_of("messages"), {"recipient": ECHO, "type": GREET, "payload": {"to": FLAKY}})
            failed = self._ended(hub, tasks[FLAKY], tick)
            hub.post(path_of("messages"), {"recipient": ECHO, "type": FINISH})
            completed = self._ended(hub, tasks[ECHO], tick)
        self.told = [
            f"Agent {ECHO} asked {FLAKY} by the hub; its task: {completed['status']}, {completed['result']}",
            f"Agent {FLAKY} answered and was killed; its task: {failed['status']}, {failed['error']}",
        ]
        planned = ((ECHO, completed, states.COMPLETED), (FLAKY, failed, states.FAILED))
        return [
            f"task of {name}: planned to be {state}, it is {task['status']}"
            for name, task, state in planned
            if task["status"] != state
        ]

    def _ended(self, hub: GatewayClient, task_id: str, tick: Callable[[], None]) -> dict[str, Any]:
        """The task when it has ended, or has not for too long."""
        deadline = time.monotonic() + self._ends_within_s
        while True:
            task: dict[str, Any] = hub.get(path_of("tasks", task_id))
            if task["status"] in states.TASK_TERMINAL or time.monotonic() > deadline:
                return task
            tick()
            time.sleep(_POLL_S)

    def _client(self) -> GatewayClient:
        # This stack's own token, whatever the environment says.
        return GatewayClient(self._settings, token=ensure_operator_token(self._settings))
