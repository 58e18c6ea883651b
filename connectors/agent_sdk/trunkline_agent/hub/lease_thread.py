"""The thread that extends the leases of a sync agent's messages while they are handled."""

from __future__ import annotations

import threading
import time

from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub import message_plans
from trunkline_agent.hub.agent_plans import LOG, give_up, overdue_by_lease, retries_of
from trunkline_agent.hub.held_messages import HeldMessages
from trunkline_agent.hub.sync_client import HubClient


class LeaseThread:
    """A daemon thread that extends the leases of an agent's messages. It starts with the first message."""

    def __init__(self, hub: HubClient, held: HeldMessages, name: str) -> None:
        self._hub = hub
        self._held = held
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._name = name
        self._wakes_at: float | None = None
        self._is_stopped = False

    def wake(self, due_at: float) -> None:
        """Note that a lease must be extended at a moment. The thread is woken only if it would sleep longer."""
        with self._changed:
            if self._thread is None and not self._is_stopped:
                self._wakes_at = due_at
                self._thread = threading.Thread(target=self._run, name=f"leases-{self._name}", daemon=True)
                self._thread.start()
            elif self._wakes_at is None or due_at < self._wakes_at:
                self._changed.notify_all()

    def stop(self) -> None:
        """Let the thread end. An extension that is under way may still be sent."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_stopped:
                    return
                self._wakes_at = self._held.next_due()
                left_s = None if self._wakes_at is None else self._wakes_at - time.monotonic()
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
            for lease_id, held in overdue_by_lease(self._held, time.monotonic()).items():
                try:
                    self._hub.run(give_up(lease_id, held))
                except TrunklineError as error:
                    LOG.warning("overdue messages of lease %s were not given back: %s", lease_id, error)
            for extension in self._held.due(time.monotonic()):
                try:
                    lost = self._hub.run(message_plans.extend(extension, retries_of(extension)))
                    self._held.lose(extension.lease_id, lost)
                except TrunklineError as error:
                    if not self._is_stopped:
                        LOG.warning("the lease of %s was not extended: %s", extension.message_ids, error)
