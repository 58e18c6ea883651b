"""The demo's scene at the gateway: a session picks its job there, and ends with it."""

from __future__ import annotations

import time
from typing import Final

from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.gateway_client.operator_token import ensure_operator_token
from schemas.errors import Refused
from schemas.fold.life_cycles import PENDING, TERMINATED
from schemas.settings.settings import Settings

_CLOSED_WITHIN_S: Final = 20.0
_POLL_S: Final = 0.1
_PENDING_LOOKED_AT: Final = 1000


def session_name(job_id: str) -> str:
    """The session that a job of the demo wants to be picked by."""
    return f"demo-{job_id}"


class GatewayScene:
    """What the demo asks of the gateway, as the operator. `picked`: the sessions that picked a job."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.picked: list[str] = []

    def pick(self, job_id: str) -> bool:
        """Create the job's session and let it pick the job; False when a job of somebody else would be picked.

        Raises Refused when the gateway hands out another job, and what GatewayClient raises.
        """
        with self._client() as gateway:
            parameters = {"state": PENDING, "limit": _PENDING_LOOKED_AT}
            pending = gateway.get(path_of("jobs"), parameters)["jobs"]
            # The oldest that fits is picked: on a stack that stays, that may be the work of a real agent.
            if any(row["session_wanted"] is None for row in pending):
                return False
            name = session_name(job_id)
            gateway.post(path_of("sessions"), {"session": name, "for_job": job_id})
            grant = gateway.post(path_of("jobs", "pick"), {"session": name})
        if grant["job_id"] != job_id:
            raise Refused(f"session {name} asked for a job and was given {grant['job_id']}")
        self.picked.append(name)
        return True

    def wait_closed(self) -> list[str]:
        """Wait until the sessions are terminated; says which are not after 20 s."""
        differences = []
        deadline = time.monotonic() + _CLOSED_WITHIN_S
        with self._client() as gateway:
            for name in self.picked:
                while (status := gateway.get(path_of("sessions", name))["status"]) != TERMINATED:
                    if time.monotonic() > deadline:
                        differences.append(f"session {name}: planned to be {TERMINATED}, it is {status}")
                        break
                    time.sleep(_POLL_S)
        return differences

    def _client(self) -> GatewayClient:
        # This stack's own token, whatever the environment says.
        return GatewayClient(self._settings, token=ensure_operator_token(self._settings))
