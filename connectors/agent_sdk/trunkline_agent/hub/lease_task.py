"""The task that extends the leases of an async agent's messages while they are handled."""

from __future__ import annotations

import asyncio
import time

from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub import message_plans
from trunkline_agent.hub.agent_plans import LOG, give_up, overdue_by_lease, retries_of
from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.held_messages import HeldMessages


class LeaseTask:
    """A task that extends the leases of an agent's messages. It starts with the first message."""

    def __init__(self, hub: AsyncHubClient, held: HeldMessages, name: str) -> None:
        self._hub = hub
        self._held = held
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._wakes_at: float | None = None

    def wake(self, due_at: float) -> None:
        """Note that a lease must be extended at a moment. The task is woken only if it would sleep longer."""
        if self._task is None:
            self._wakes_at = due_at
            self._task = asyncio.create_task(self._run(), name=f"leases-{self._name}")
        elif self._wakes_at is None or due_at < self._wakes_at:
            self._changed.set()

    async def stop(self) -> None:
        """End the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            self._wakes_at = self._held.next_due()
            left_s = None if self._wakes_at is None else self._wakes_at - time.monotonic()
            if left_s is None or left_s > 0:
                self._changed.clear()
                try:
                    async with asyncio.timeout(left_s):
                        await self._changed.wait()
                except TimeoutError:
                    pass
                continue
            for lease_id, held in overdue_by_lease(self._held, time.monotonic()).items():
                try:
                    await self._hub.run(give_up(lease_id, held))
                except TrunklineError as error:
                    LOG.warning("overdue messages of lease %s were not given back: %s", lease_id, error)
            for extension in self._held.due(time.monotonic()):
                try:
                    lost = await self._hub.run(message_plans.extend(extension, retries_of(extension)))
                    self._held.lose(extension.lease_id, lost)
                except TrunklineError as error:
                    LOG.warning("the lease of %s was not extended: %s", extension.message_ids, error)
