"""`trunkline dead-letters`, `jobs export` and `tail --live`: what was settled, shown, replayed, written out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from connectors.log.ledger_files.ledger_replay import parse_position
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import JOB_EVENT
from schemas.wire.record import OutgoingRecord, oversized
from tests.connectors.cli.conftest import CommandLine, read_line
from tests.connectors.ledger_tables import LedgerTable, settings_below
from trunkline_agent.errors import UsageError
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.topics import events_topic

JOB = "0a1b2c3d"


@pytest.fixture
def own(tmp_path: Path) -> CommandLine:
    return CommandLine(settings_below(tmp_path))


@pytest.fixture
def table(own: CommandLine) -> LedgerTable:
    """A job that ended, and four rejections: 0/3 to 0/6."""
    found = LedgerTable(own.settings)
    large = OutgoingRecord(f"job/{JOB}", "x-1", "mqtt", "unverified", JOB_EVENT, b"x" * 9000)
    found.commit(found.registered(JOB), found.event(JOB, 1, "begins"), found.event(JOB, 2, "in /home/ann/x"))
    found.commit(
        found.message(f"job/{JOB}", b'{"bidi \xe2\x80\xae": 1}'),
        found.message("refused/mqtt", b"password: hunter2", door="xml"),
        found.settled(oversized(large, 100)),
        found.event(JOB, 9, "late", event="started"),
        found.event(JOB, 3, "all done", event="completed"),
    )
    return found


def _lines(done: Any) -> list[dict[str, Any]]:
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.usefixtures("table")
def test_list_shows_the_newest_rejections_that_fit(own: CommandLine) -> None:
    def offsets(*arguments: str) -> list[int]:
        return [row["offset"] for row in _lines(own.call("dead-letters", "list", "--json", *arguments))]

    assert offsets() == [3, 4, 5, 6]
    assert offsets("--limit", "2") == [5, 6]
    assert offsets("--reason", "illegal_transition") == [6]
    assert offsets("--door", "xml") == [4]
    assert offsets("--stream", f"job/{JOB}") == [3, 5, 6]
    assert offsets("--since", "1s") == []
    shown = own.call("dead-letters", "list")
    assert "0/6" in shown.stdout
    assert own.call("dead-letters", "list", "--reason", "fold_failed").returncode == 3
    assert own.call("dead-letters", "list", "--stream", "no/such/thing").returncode == 2


@pytest.mark.requirement("CM-05")
@pytest.mark.requirement("CM-06")
@pytest.mark.usefixtures("table")
def test_show_has_all_columns_masked_and_escaped(own: CommandLine) -> None:
    (row,) = _lines(own.call("dead-letters", "show", "0/4", "--json"))
    assert (row["reason"], row["masked"], row["stream_id"]) == ("malformed", "value", "mqtt")
    assert "value_sealed" not in row
    for shown in (own.call("dead-letters", "show", "0/4"), own.call("dead-letters", "list", "--json")):
        assert "hunter2" not in shown.stdout
    hostile = own.call("dead-letters", "show", "0/3").stdout
    assert ("\u202e" in hostile, "\\u202e" in hostile) == (False, True)
    assert own.call("dead-letters", "show", "0/1").returncode == 3
    assert own.call("dead-letters", "show", "7/7").returncode == 3
    for wrong in ("1", "a/b", "1/-1", "1/2/3", ""):
        with pytest.raises(UsageError):
            parse_position(wrong)


@pytest.mark.requirement("JE-12")
@pytest.mark.usefixtures("table")
def test_export_writes_the_jobs_history_whole_without_secrets_and_never_over_something(
    own: CommandLine, tmp_path: Path
) -> None:
    to = tmp_path / "audit" / JOB
    arguments = ("jobs", "export", JOB, "--to", str(to), "--json")
    (told,) = _lines(own.call(*arguments))
    assert told == {"job_id": JOB, "to": str(to), "status": "completed", "events": 7}
    assert sorted(p.name for p in to.parent.rglob("*") if p.is_file()) == [
        "events.ndjson", "meta.json", "status.json",
    ]  # fmt: skip
    meta = json.loads((to / "meta.json").read_text())
    assert (meta["description"], meta["registered_by"]) == ("a job", "cli/operator")
    status = json.loads((to / "status.json").read_text())
    assert (status["status"], status["events"], status["last_seq"]) == ("completed", 3, 3)
    assert status["verdicts"] == {"accepted": 4, "rejected": 3}
    assert status["ended_at"].endswith("Z")
    lines = [json.loads(line) for line in (to / "events.ndjson").read_text().splitlines()]
    assert [line["offset"] for line in lines] == [0, 1, 2, 3, 5, 6, 7]
    text = "".join(path.read_text() for path in to.iterdir())
    assert "sealed" not in text.replace("value_sealed", "")
    assert "/home/ann" not in text
    again = own.call(*arguments)
    assert again.returncode == 2
    assert "not overwritten" in again.stderr
    assert own.call("jobs", "export", "ffffffff", "--to", str(tmp_path / "none")).returncode == 3
    assert not (tmp_path / "none").exists()
    assert list(to.parent.iterdir()) == [to]


@pytest.mark.usefixtures("table")
def test_what_cannot_be_replayed_is_refused_with_the_reason(own: CommandLine) -> None:
    keys = json.dumps({"active": "test", "keys": {"test": "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="}})
    for position, why in (("0/5", "only the first bytes"), ("0/1", "was not rejected")):
        done = own.call("dead-letters", "replay", position, TRUNKLINE__MASTER_KEY=keys)
        assert done.returncode == 4, done.stderr
        assert why in done.stderr


@pytest.mark.requirement("CM-05")
def test_replay_appends_the_record_as_it_came_and_says_its_new_verdict(
    hub: GatewayClient, trunkline: CommandLine, hub_settings: Settings, keyring: Any, read_topic: Any
) -> None:
    job = hub.post(path_of("jobs"), {"description": "x"})
    # As the ledger has it: an event that was refused before its job was known, its detail masked.
    body = {"schema_version": 1, "seq": 1, "job_id": job["job_id"], "event": "started", "data": {}}
    body |= {"timestamp": "2026-11-21T10:00:00Z", "detail": "in /home/ann/x"}
    value = canonical(sign_event(body, job["secret"]))
    topic = events_topic(hub_settings.mqtt.topic_prefix, job["job_id"])
    outgoing = OutgoingRecord(
        f"job/{job['job_id']}", content_id(topic.encode(), value), "mqtt", "unverified", JOB_EVENT, value
    )
    _write(LedgerTable(hub_settings), outgoing, keyring)
    (told,) = _lines(trunkline.call("dead-letters", "replay", "0/0", "--json"))
    assert (told["replayed"], told["verdict"]) == ([0, 0], "accepted")
    record = next(r for r in read_topic(2) if [r.partition, r.offset] == told["position"])
    assert record.value == value
    headers = dict(record.headers)
    assert headers["ce_id"].decode() == outgoing.ce_id
    assert headers["ce_source"] == b"mqtt/unverified"
    assert hub.get(path_of("jobs", job["job_id"]))["last_detail"] == "[masked]"
    again = trunkline.call("dead-letters", "replay", "0/0")
    assert (again.returncode, "duplicate" in again.stdout) == (0, True)
    hub.post(path_of("jobs", job["job_id"], "cancel"))


def _write(table: LedgerTable, outgoing: OutgoingRecord, keyring: Any) -> None:
    row = table.settled(outgoing)
    assert (row.verdict, row.reason, row.masked) == ("rejected", "unknown_stream", "detail")
    purpose = f"value/{row.topic}/{row.partition}/{row.offset}"
    table.commit(row._replace(value_sealed=keyring.seal(outgoing.value, purpose)))


def test_tail_live_shows_what_is_settled_at_once(hub: GatewayClient, trunkline: CommandLine, sent: Any) -> None:
    plain = trunkline.start("tail", "--live")
    as_json = trunkline.start("tail", "--live", "--json", "--type", "job.registered")
    read_line(plain, "STREAM")
    first = hub.post(path_of("jobs"), {"description": "x"})
    assert "accepted" in read_line(plain, f"job/{first['job_id']}")
    hub.post(path_of("jobs", first["job_id"], "cancel"))
    assert "job.cancelled" in read_line(plain, f"job/{first['job_id']}")
    sent(plain)
    assert plain.wait(20) == 130
    with jobs_coming_in(hub) as positions:
        told = json.loads(read_line(as_json, "job.registered"))
    assert told["position"] in [first["position"], *positions] and told["verdict"] == "accepted"


@contextmanager
def jobs_coming_in(hub: GatewayClient) -> Iterator[list[list[int]]]:
    """Registers jobs, one after the other, for a command of which nobody can see when it begins to listen."""
    positions: list[list[int]] = []
    stop = threading.Event()

    def register() -> None:
        while not stop.wait(0.2):
            positions.append(hub.post(path_of("jobs"), {"description": "y"})["position"])

    thread = threading.Thread(target=register)
    thread.start()
    try:
        yield positions
    finally:
        stop.set()
        thread.join()
