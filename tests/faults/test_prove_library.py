"""Programs of the library in `./trunkline prove`: killed at each named point they lose and double nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.broker_processes import BrokerProcess
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.connectors.doors.http_api.hub_stack import HubStack, hub_settings
from tests.faults.prove import evidence
from tests.faults.prove.comparison import DUPLICATE, LOST, MISBEHAVED, Finding, Line, Mail
from tests.faults.prove.crash_points import arm, fired
from tests.faults.prove.crashing_library import ACKS_FIRST, BUG_VARIABLE, WRITES_NOTHING
from tests.faults.prove.hub_client import Clock, HubClient
from tests.faults.prove.library_load import (
    LARS,
    OLGA,
    UWE,
    LibraryLoad,
    LibraryNotes,
    check_library,
)
from tests.faults.prove.library_program import EVENTS, detail_of, kind_of
from tests.faults.prove.oracle import ACKED, Oracle, content_hash
from tests.faults.prove.schedule import LIBRARY, LIBRARY_POINTS, TAKEN, WRITTEN
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub import sync_client
from trunkline_agent.hub.plans import Request

BOSS, LEASE_S, LOAD_S, PATIENCE_S = "boss", 1, 60.0, 60.0
# Enough for each point, several of which need a program that has started again.
KILLS_WITHIN_S = 40.0


@pytest.fixture(scope="module")
def hub(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStack]:
    """One gateway."""
    folder = tmp_path_factory.mktemp("hub")
    stack = HubStack(hub_settings(kafka_broker, folder), folder)
    try:
        stack.start(1)
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def tokens(hub: HubStack) -> dict[str, str]:
    """The tokens of the principals of the load."""
    roles = {UWE: "worker", LARS: "worker", OLGA: "worker", BOSS: "delegator"}
    return {name: add_principal(hub.operator, name, role) for name, role in roles.items()}


class EventLog(threading.Thread):
    """The job events that the gateway settles, as lines of the ledger."""

    def __init__(self, access: HubAccess) -> None:
        super().__init__(daemon=True)
        self._hub = sync_client.HubClient(access)
        self.lines: list[Line] = []

    def run(self) -> None:
        """Read until the client is closed."""
        try:
            with closing(self._hub.events(Request("GET", "/api/hub/events", {"type": "job.event"}))) as events:
                for event in events:
                    if event.name == "settled":
                        told = event.json()
                        body = told["body"]
                        said = content_hash(body["event"], body["detail"])
                        stream, seq = f"job/{body['job_id']}", str(body["seq"])
                        self.lines.append(Line(0, 0, stream, "job.event", told["verdict"], seq, said))
        except TrunklineError:
            return

    def close(self) -> None:
        """End it."""
        self._hub.close()
        self.join(10)


def run_load(
    hub: HubStack, tokens: dict[str, str], tmp_path: Path, points: Sequence[str], bugs: str = ""
) -> tuple[list[Finding], LibraryNotes, Oracle]:
    """Run the programs until they have died at each of these points, and then to their end."""
    url, clock, oracle = hub.gateways[0].url, Clock(), Oracle(tmp_path / "oracle.jsonl")
    clock.begin(LOAD_S, PATIENCE_S)
    asker, boss = (HubClient([url], tokens[name], clock, seed=1) for name in (UWE, BOSS))
    folder = tmp_path / "points"
    for point in points:
        arm(folder, f"{LIBRARY}.{point}", 2)
    log = EventLog(HubAccess(url, hub.settings.operator_token_file.read_text().strip()))
    log.start()
    load = LibraryLoad(
        url,
        asker,
        boss,
        tokens[BOSS],
        tokens[LARS],
        tmp_path,
        folder,
        oracle,
        clock,
        environment={BUG_VARIABLE: bugs},
        lease_s=LEASE_S,
    )
    threads = [threading.Thread(target=run, daemon=True) for _, run in load.runs()]
    for thread in threads:
        thread.start()
    until = time.monotonic() + KILLS_WITHIN_S
    while time.monotonic() < until and not all(fired(folder, f"{LIBRARY}.{point}") for point in points):
        time.sleep(0.1)
    clock.begin(0.0, PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    asker.close()
    boss.close()
    boxes = {f"mailbox/default/{name}" for name in (UWE, LARS, OLGA)}
    mail = evidence.answered("gateway", url, hub.settings, boxes).mail
    time.sleep(0.5)  # the stream has all that was acknowledged, or soon
    log.close()
    assert [point for point in points if not fired(folder, f"{LIBRARY}.{point}")] == []
    return list(check_library(load.notes, mail, log.lines, is_at_rest=True)), load.notes, oracle


@pytest.mark.kafka
@pytest.mark.requirement("AG-70")
@pytest.mark.timeout(180)
def test_programs_of_the_library_that_are_killed_at_each_point_lose_and_double_nothing(
    hub: HubStack, tokens: dict[str, str], tmp_path: Path
) -> None:
    found, notes, oracle = run_load(hub, tokens, tmp_path, LIBRARY_POINTS)
    assert found == []
    assert notes.kills == len(LIBRARY_POINTS)
    acked = {(note.stream, note.id) for note in oracle.notes(ACKED)}
    assert acked >= {(f"mailbox/default/{LARS}", one) for one in notes.questions}
    # Its last note of a job may be what the killed program did not get to.
    assert len([one for one in acked if one[0].startswith("job/")]) >= EVENTS * len(notes.jobs) - notes.kills


@pytest.mark.kafka
@pytest.mark.requirement("AG-71")
@pytest.mark.timeout(180)
def test_an_early_acknowledgement_and_an_outbox_without_events_are_found(
    hub: HubStack, tokens: dict[str, str], tmp_path: Path
) -> None:
    found, _, _ = run_load(hub, tokens, tmp_path, (TAKEN, WRITTEN), f"{ACKS_FIRST} {WRITES_NOTHING}")
    lost = [finding.what for finding in found if finding.kind == LOST]
    assert any("answer to uwe" in what for what in lost), found
    assert any("of job" in what for what in lost), found


QUESTION, JOB = "0192e1d4-5c1f-7c7e-9c55-0d0f5e7b1a11", "0a1b2c3d"


def judged(
    *, answers: int = 1, abouts: int = 1, status: str = "claimed", events: int = 1, is_at_rest: bool = True
) -> list[str]:
    """The kinds of the findings where these are the counts of what must be there once."""
    body = json.dumps({"text": "what"}, separators=(",", ":"))
    box = "mailbox/default/"
    mail = {(f"{box}{LARS}", QUESTION): Mail(f"{box}{LARS}", QUESTION, status)}
    for name, kind, count in ((UWE, "answer", answers), (OLGA, "about", abouts)):
        for number in range(count):
            one = f"{kind}-{number}"
            mail[f"{box}{name}", one] = Mail(f"{box}{name}", one, "unread", kind=kind, body=body)
    seqs = [seq for seq in range(1, EVENTS + 1) for _ in range(events if seq == 2 else 1)]
    hashes = {seq: content_hash(kind_of(seq), detail_of(JOB, seq)) for seq in seqs}
    ledger = [Line(0, 0, f"job/{JOB}", "job.event", "accepted", str(seq), hashes[seq]) for seq in seqs]
    notes = LibraryNotes({QUESTION: "what"}, [JOB])
    return [finding.kind for finding in check_library(notes, mail, ledger, is_at_rest=is_at_rest)]


@pytest.mark.requirement("AG-71")
def test_each_kind_of_finding_about_the_library_is_seen_when_it_is_planted() -> None:
    assert judged() == []
    for what in ("answers", "abouts", "events"):
        assert judged(**{what: 0}) == [LOST]  # type: ignore[arg-type]
        assert judged(**{what: 0}, is_at_rest=False) == []  # type: ignore[arg-type]
        assert judged(**{what: 2}, is_at_rest=False) == [DUPLICATE]  # type: ignore[arg-type]
    assert judged(status="leased") == [MISBEHAVED]
