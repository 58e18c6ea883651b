"""`trunkline monitor` while the gateway is away: what has changed is kept for later, a mend is tried again."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.cli.follow.monitor_loop import DriftWatch, PlainLines
from connectors.plumbing.gateway_client.event_stream import EventStream, RegistryFollower, follow_registries
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.processes.session_host import SessionHost
from connectors.programs.processes.session_registry_client import JOB_WITHOUT_SESSION, Drift
from schemas.settings.settings import Settings
from tests.broker_processes import ProgramProcess, wait_until
from tests.connectors.cli.conftest import CommandLine

pytestmark = pytest.mark.requirement("JE-25")


class Notes(PlainLines):
    """Keeps what it is told of drift."""

    def __init__(self) -> None:
        self.told: list[tuple[Drift, str | None]] = []

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        self.told.append((drift, outcome))


def _follower(client: GatewayClient, stream: EventStream) -> RegistryFollower:
    found = RegistryFollower(client)
    found.take(stream.first(20))
    return found


def test_what_changed_is_looked_up_when_the_gateway_is_back(
    hub: GatewayClient, gateway: ProgramProcess, next_gateway: Any
) -> None:
    job = hub.post(path_of("jobs"), {"description": "x"})["job_id"]
    with follow_registries(hub) as stream:
        registries = _follower(hub, stream)
        hub.post(path_of("jobs", job, "cancel"))

        def cancelled_is_taken() -> bool:
            event = stream.next(0.5)
            if event is not None:
                registries.take(event)
            return event is not None and event.data.get("status_after") == "cancelled"

        wait_until(cancelled_is_taken, what="the event")
    gateway.kill()
    assert registries.refresh() == []
    assert registries.failure is not None
    assert registries.job_status("00000000") is None
    next_gateway()
    (change,) = registries.refresh()
    assert (change.name, change.row["status"], registries.failure) == (job, "cancelled", None)


def test_a_mend_that_got_no_answer_is_told_once_and_tried_again(
    hub: GatewayClient, gateway: ProgramProcess, next_gateway: Any, hub_settings: Settings
) -> None:
    job = hub.post(path_of("jobs"), {"description": "x", "session": "s1"})["job_id"]
    hub.post(path_of("sessions"), {"session": "s1"})
    hub.post(path_of("jobs", "pick"), {"session": "s1"})
    hub.post(path_of("sessions", "s1", "stop"), {"mode": "hard"})
    with follow_registries(hub) as stream:
        registries = _follower(hub, stream)
    notes = Notes()
    watch = DriftWatch(hub, registries, SessionHost(hub_settings), notes, mend=True)
    gateway.kill()
    for _ in range(3):
        watch.look()
    ((drift, outcome),) = notes.told
    assert (drift.kind, drift.job_id) == (JOB_WITHOUT_SESSION, job)
    assert outcome is not None
    assert outcome.startswith("not mended yet")
    assert watch.unmended == [drift]
    next_gateway()
    watch.look()
    assert notes.told[1:] == [(drift, f"job {job} is cancelled")]
    assert watch.unmended == []
    # The repair is not repeated before the changed row is seen.
    watch.look()
    assert len(notes.told) == 2
    assert hub.get(path_of("jobs", job))["status"] == "cancelled"


def test_the_help_says_what_is_ended_for_good(trunkline: CommandLine) -> None:
    said = " ".join(trunkline.call("monitor", "--help").stdout.split())
    assert "a session that runs, but its process is dead on this machine" in said
    assert "terminates such a session: for good" in said
