"""The subscriber decides by the fold (JE-09), and knows when a watch is over (JE-21, JE-22)."""

from __future__ import annotations

import json
import random
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from connectors.doors.mqtt_bridge.bridge_records import job_event_record
from connectors.tools.job_tools.job_files import (
    KeptSecrets,
    kept_secrets,
    secret_path,
    store_rotated,
    store_secret,
)
from connectors.tools.job_tools.job_watcher import JobWatcher, Outcomes, Sight, Timers
from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.settings.settings import LimitSettings, Settings
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import JobRegistration
from schemas.wire.record import OutgoingRecord, Record, oversized
from tests.schemas.job_records import signed
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.topics import events_topic

JOB, OTHER, SECRET = "0a1b2c3d", "4e5f6a7b", "a-secret"
SETTINGS = Settings(limits=LimitSettings(payload_bytes=4096))
TOPIC = events_topic(SETTINGS.mqtt.topic_prefix, JOB)


def _event(
    seq: int, event: str = "progress", detail: str = "goes on", secret: str = SECRET, **more: Any
) -> bytes:
    return canonical(signed(seq, event, secret, **{"job_id": JOB, "detail": detail, **more}))


class Backbone:
    """The same fold with the backbone's keyring, as its runners call it."""

    def __init__(self) -> None:
        self.keyring = Keyring({"master": b"m" * 32}, "master")
        self.entries = Entries()
        self.offset = 0
        self.settle(
            JobRegistration(
                sealed_secret=self.keyring.seal(SECRET.encode(), job_secret_purpose(JOB)),
                job_id=JOB,
                description="a job",
            ).record(door="cli", principal="operator")
        )

    def settle(self, outgoing: OutgoingRecord) -> Settled:
        outgoing = oversized(outgoing, SETTINGS.limits.payload_bytes)
        headers = outgoing.headers()
        names, values = tuple(n for n, _ in headers), tuple(v for _, v in headers)
        self.offset += 1
        record = Record("t", 3, self.offset, 1_790_000_000_000_000, outgoing.key, outgoing.value, names, values)
        return settle(record, self.entries, self.keyring, Entries())


def _messages(rng: random.Random) -> list[bytes]:
    good = [_event(1, "started"), *(_event(seq, detail=f"step {seq}") for seq in range(2, 30))]
    bad = [
        b"{", b"[]", b"\xff", _event(3, secret="another"), _event(4, detail="other content"), _event(0),
        _event(5, "started"), _event(6, schema_version=2), _event(7, job_id=OTHER), _event(31, "completed"),
        _event(32, "error"), _event(8, data={"auth_token": "x"}), _event(33, detail="wrote /home/ann/x"),
        _event(34, data={"text": "x" * 5000}), _event(9, more={"kept": True}),
    ]  # fmt: skip
    found = [*good, *bad, *rng.sample(good, 10)]
    rng.shuffle(found)
    return found


@pytest.mark.requirement("JE-09")
@pytest.mark.parametrize("seed", range(25))
def test_the_subscriber_gives_every_message_the_verdict_that_the_backbone_gives_it(seed: int) -> None:
    watcher, backbone = JobWatcher(SETTINGS, JOB, SECRET), Backbone()
    seen = set()
    for payload in _messages(random.Random(seed)):
        here = watcher.settle(TOPIC, payload)
        there = backbone.settle(job_event_record(SETTINGS.mqtt.topic_prefix, TOPIC, payload, None))
        for field in ("verdict", "reason", "why", "late", "status_after", "seq", "masked", "shown"):
            assert getattr(here, field) == getattr(there, field)
        seen.add(here.reason or here.verdict)
    assert {"accepted", "malformed", "bad_signature", "too_large"} <= seen


@pytest.mark.requirement("JE-20")
@pytest.mark.requirement("CM-06")
def test_an_accepted_event_is_one_line_of_json_and_what_is_unsafe_in_it_is_masked() -> None:
    watcher = JobWatcher(SETTINGS, JOB, SECRET)
    seen = watcher.see(TOPIC, _event(1, "started", "wrote /home/ann/x"))
    assert seen.line is not None
    assert json.loads(seen.line)["detail"] == "[masked]"
    hostile = watcher.see(TOPIC, _event(2, detail="bidi \u202e zero\u200b"))
    assert hostile.line is not None
    assert hostile.line.isascii()
    assert hostile.line.isprintable()
    assert json.loads(hostile.line)["detail"] == "bidi \u202e zero\u200b"
    refused = watcher.see(TOPIC, _event(3, secret="another"))
    assert (refused.line, refused.status) == (None, None)
    assert "bad_signature" in str(refused.note)


@pytest.mark.requirement("JE-22")
def test_a_watch_follows_a_rotation_of_the_stored_secret_and_knows_until_when_both_are_good(
    tmp_path: Path,
) -> None:
    settings, new = Settings(data_dir=tmp_path), "5e5e5e5e.new"
    store_secret(settings, JOB, SECRET)

    def watcher() -> JobWatcher:
        kept = kept_secrets(settings, JOB)
        assert kept is not None
        return JobWatcher(SETTINGS, JOB, kept.secret, lambda: kept_secrets(settings, JOB))

    def reason(one: JobWatcher, seq: int, secret: str) -> str | None:
        return one.settle(TOPIC, _event(seq, secret=secret)).reason

    running = watcher()
    assert [reason(running, 1, secret) for secret in (SECRET, new)] == [None, "bad_signature"]
    for _ in range(2):  # The same rotation once more takes nothing away.
        store_rotated(settings, JOB, new, time.time() + 600)
    assert stat.S_IMODE(secret_path(settings, JOB).with_name(f"{JOB}.former").stat().st_mode) == 0o600
    later = watcher()
    for one in (running, later):
        assert [reason(one, seq, secret) for seq, secret in ((2, new), (3, SECRET), (4, "another"))] == [
            None,
            None,
            "bad_signature",
        ]
    store_secret(settings, JOB, SECRET)
    store_rotated(settings, JOB, new, time.time() - 1)
    assert kept_secrets(settings, JOB) == KeptSecrets(new)
    assert [reason(watcher(), 1, secret) for secret in (SECRET, new)] == ["bad_signature", None]


@pytest.mark.requirement("JE-22")
def test_a_terminal_event_alone_ends_the_job_and_later_ones_are_ignored() -> None:
    watcher, outcomes = JobWatcher(SETTINGS, JOB, SECRET), Outcomes([JOB])
    first = outcomes.take(watcher.see(TOPIC, _event(7, "completed")))
    assert first.line is not None
    assert outcomes.exit_code() == 0
    for later in (_event(7, "completed"), _event(8, "error"), _event(9)):
        told = outcomes.take(watcher.see(TOPIC, later))
        assert told.line is None
        assert told.note
    assert outcomes.exit_code() == 0


@pytest.mark.requirement("JE-21")
@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (["completed", "completed"], 0),
        (["completed", "error"], 1),
        (["cancelled", "completed"], 1),
        (["completed", "running"], None),
        (["error", None], None),
    ],
)
def test_the_exit_code_is_0_only_if_all_completed_and_1_when_one_did_not(
    ends: list[str | None], code: int | None
) -> None:
    outcomes = Outcomes([JOB, OTHER])
    for job, status in zip((JOB, OTHER), ends, strict=True):
        outcomes.take(Sight(job, status))
    assert outcomes.exit_code() == code


def test_when_all_are_watched_jobs_that_had_ended_before_do_not_count() -> None:
    outcomes = Outcomes([OTHER], open_ended=True)
    assert outcomes.take(Sight(OTHER, "error", line="{}", before=True)).line == "{}"
    assert outcomes.exit_code() is None
    outcomes.take(Sight(JOB, "running", line="{}"))
    assert outcomes.open_jobs() == [JOB]
    outcomes.take(Sight(JOB, "completed", line="{}"))
    assert outcomes.exit_code() == 0
    assert outcomes.follows("ffffffff")
    assert not Outcomes([JOB]).follows("ffffffff")


@pytest.mark.requirement("JE-21")
def test_the_budget_runs_from_the_start_and_the_idle_timer_from_the_last_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    timers = Timers(10, 4)
    now[0] += 3
    assert timers.left_s() == 1
    timers.restart_idle()
    assert timers.left_s() == 4
    now[0] += 6
    assert timers.left_s() <= 0
    assert "no event" in timers.ran_out()
    timers.restart_idle()
    assert timers.left_s() == 1
    now[0] += 1
    assert "the time" in timers.ran_out()
    assert Timers(None, None).left_s() == float("inf")
