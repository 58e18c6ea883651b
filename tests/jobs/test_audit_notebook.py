"""The audit notebooks run from their first cell to their last on real tables, and show what is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from connectors.doors.file_bridge.records import claims_of, posting_of, refusal_of
from connectors.doors.mqtt_bridge.bridge_records import job_event_record
from connectors.programs.local_stack import free_port
from jobs import build_views
from schemas.keys.sealing import Keyring
from schemas.settings.settings import KafkaSettings, Settings
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim, MailboxLease
from schemas.streams.mailboxes.message import MAILBOX_VIEW, Message
from schemas.streams.refused.refusal import Refusal
from schemas.wire.record import OutgoingRecord
from tests.jobs.conftest import Rows
from tests.jobs.topic_load import append_all, event, registration
from tests.notebook_run import NOTEBOOKS, notebook, run_here
from trunkline_agent.wire.topics import events_topic

FIVE = ("agent_audit", "custody_audit", "job_audit", "message_audit", "refusal_audit")
JOB, OTHER_JOB = "ab12cd34", "ffffffff"


def test_notebooks_are_committed_without_outputs_and_say_what_they_answer_and_take() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.glob("*_audit.ipynb")) == sorted(FIVE)
    for name in FIVE:
        first, parameters, *rest = notebook(name).cells
        assert first.source.startswith("# ") and f"notebooks/{name}.ipynb" in first.source
        assert parameters.metadata["tags"] == ["parameters"] and "data_dir = None" in parameters.source
        cells = [cell for cell in (parameters, *rest) if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in cells), name


@pytest.mark.parametrize("name", FIVE)
def test_on_an_empty_backbone_a_notebook_says_so_and_runs_to_its_end(
    name: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheard = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    run = run_here(name, Settings(data_dir=tmp_path, kafka=unheard), monkeypatch)
    assert "There is no ledger below" in run.text and run.plots
    # Checks at the end run, too: they have nothing to compare.
    assert "0 of 0" in run.text or "0 records" in run.text or "nothing to check" in run.text


def test_the_audit_notebook_tells_what_happened_to_a_job_and_what_was_refused(
    spark: SparkSession,
    drain: Callable[[], Rows],
    backbone_settings: Settings,
    keyring: Keyring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forged = event(JOB, 2).value.replace(b"going on", b"forged!!")
    prefix = backbone_settings.mqtt.topic_prefix
    by_bridge = job_event_record(prefix, events_topic(prefix, JOB), forged, None)
    records = [
        registration(JOB, keyring),
        event(JOB, 1, "started", "the stars are counted"),
        by_bridge,
        event(JOB, 2),
        event(JOB, 2),
        event(JOB, 3, "completed"),
        event(JOB, 4),
        event(OTHER_JOB, 1, "started"),
    ]
    append_all(backbone_settings, records)
    drain()
    build_views.catch_up(backbone_settings)
    monkeypatch.setenv("TRUNKLINE_AUDIT_JOB", JOB)
    run = run_here("job_audit", backbone_settings, monkeypatch)
    text = run.text
    for expected in ("the stars are counted", "completed", "bad_signature", "after_terminal", "unknown_stream"):
        assert expected in text, expected
    assert "1 of 1 registry rows stand at the ledger's end and agree with it" in text
    assert len(run.plots) == 4
    monkeypatch.setenv("TRUNKLINE_AUDIT_EVENT", by_bridge.ce_id)
    chain = run_here("custody_audit", backbone_settings, monkeypatch).text
    assert by_bridge.ce_id in chain
    # Kafka answers here: its copy is compared.
    for expected in ("kafka the same bytes in Kafka and ledger ok", "ledger signature missing or forged ok"):
        assert expected in chain, expected


@pytest.mark.requirement("HH-08")
def test_the_message_notebook_tells_who_wrote_to_whom_how_long_it_took_and_what_was_refused(
    drain: Callable[[], Rows], backbone_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal(
        request_id="q1", reason="policy", why="the envelope has no type", principal="ann", route="r"
    )
    messages = [
        {
            "message_id": f"m{number}",
            "from": "ann",
            "to": "builder",
            "kind": "ask",
            "body": '{"text":"how far"}',
        }
        for number in range(3)
    ]
    posted = [Message.model_validate(m).record(door="http", principal="ann") for m in messages]
    other = Message.model_validate({**messages[0], "body": "{}"})
    append_all(backbone_settings, [*posted, refusal.record(door="http", principal=refusal.principal)])
    append_all(
        backbone_settings,
        [MailboxClaim(to="builder", request_id="q1", limit=2).record(door="http", principal="builder")],
    )
    append_all(backbone_settings, [other.record(door="http", principal="ann")])
    drain()
    build_views.catch_up(backbone_settings)
    run = run_here("message_audit", backbone_settings, monkeypatch)
    text = run.text
    assert "0 file agents in 0 sessions" in text
    for expected in (
        "how far",
        "claimed",
        "the envelope has no type",
        "seq_conflict",
        "2 were handed out, 1 wait",
    ):
        assert expected in text, expected
    assert "3 of 3 accepted messages are in the view, each once" in text
    assert len(run.plots) == 4
    refusals = run_here("refusal_audit", backbone_settings, monkeypatch).text
    assert "1 requests were refused by a door's own decision, 0 more were held back." in refusals
    assert "ann policy r 1" in refusals


def line_of_queue(msg_id: str, sender: str, to: str | None) -> dict[str, object]:
    """A message as the queue's library reads it from a line."""
    return {
        "msg_id": msg_id,
        "ts": "2026-11-21T10:00:00.000000Z",
        "from": sender,
        "to": to,
        "topic": "ask",
        "body": "a line of the queue",
        "in_reply_to": None,
        "ttl_s": None,
    }


def claim_of_poll(session: str, agent: str, *taken: str) -> OutgoingRecord:
    """Return the claim that the bridge makes of a poll that took these messages."""
    poll = {"session": session, "agent_id": agent, "ts": "2026-11-21T10:00:01.000000Z", "msg_ids": taken}
    (claim,) = claims_of(poll)
    return claim


def posting_by_http(message_id: str, to: str) -> OutgoingRecord:
    """A message by HTTP."""
    said = {
        "message_id": message_id,
        "from": "ann",
        "from_verified": True,
        "to": to,
        "kind": "ask",
        "body": "{}",
    }
    return Message.model_validate(said).record(door="http", principal="ann")


def seconds_until_polls(settings: Settings, session: str) -> list[float]:
    """How long the messages waited that polls took in a session, as the mailbox table has it."""
    rows = DeltaTable(settings.table_path(MAILBOX_VIEW)).to_pyarrow_table().to_pylist()
    by_poll = [row for row in rows if row["handed_to"] == "file/unverified" and row["realm"] == session]
    return sorted((row["handed_at"] - row["posted_at"]).total_seconds() for row in by_poll)


@pytest.mark.requirement("FQ-16")
def test_the_message_notebook_tells_what_file_agents_did(
    drain: Callable[[], Rows], backbone_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody = line_of_queue("l3", "fay", None)
    for records in (
        [
            posting_of(line_of_queue("l1", "fay", "carol"), "default", "carol"),
            posting_of(line_of_queue("l2", "fay", "bob"), "lab", "bob"),
            posting_of(line_of_queue("l2", "fay", "bob"), "lab", "bob"),
            refusal_of("lab", b"no line of the queue\xff"),
            *(posting_by_http(f"h-{to}", to) for to in ("bob", "dan", "erik")),
        ],
        [posting_of(everybody, "lab", recipient) for recipient in ("bob", "gus")],
        [
            claim_of_poll("default", "bob", "h-bob"),
            claim_of_poll("lab", "bob", "l2", "l3"),
            MailboxClaim(to="carol", request_id="q1", limit=2).record(door="http", principal="carol"),
            MailboxLease(to="dan", request_id="q2").record(door="http", principal="dan"),
        ],
        # Two doors for one mailbox: polls take what was drained by HTTP, what is leased, and what never came.
        [
            claim_of_poll("default", "carol", "l1", "l9"),
            claim_of_poll("default", "dan", "h-dan"),
            claim_of_poll("default", "bob", "h-bob"),
            posting_by_http("h-again", "bob"),
        ],
    ):
        append_all(backbone_settings, records)
    drain()
    build_views.catch_up(backbone_settings)
    run = run_here("message_audit", backbone_settings, monkeypatch)
    told = run.section("What file agents did").splitlines()
    waited = {session: seconds_until_polls(backbone_settings, session) for session in ("default", "lab")}
    (first, last), (short, long) = waited["default"], waited["lab"]
    expected = [
        "5 file agents in 2 sessions",
        # Lines written, messages taken by polls, messages that wait.
        *("default bob 0 1 1", "dan 0 1 0", "fay 1 0 0", "lab bob 0 2 0", "fay 2 0 0"),
        "2 crossed from another door into files, 1 from files to another door",
        "1 posts were carried again by the bridge and count once",
        *("default file http 1", "http file 2", "lab file file 2", "nobody 1"),
        f"default: 2 taken by polls, median {(first + last) / 2:.3f} s, longest {last:.3f} s",
        f"lab: 2 taken by polls, median {(short + long) / 2:.3f} s, longest {long:.3f} s",
        "polls took 6 messages, 2 of them are not theirs in the mailbox",
        "0 of 5 claims of polls were refused",
    ]
    assert [line for line in told if line in expected] == expected
    for apart in (
        "default/carol l1 claimed http/carol accepted None",
        "default/carol l9 never posted NaN accepted",
    ):
        assert any(apart in line for line in told), apart
    assert not any("erik" in line or "gus" in line for line in told)
    refused = run.section("What policy refused")
    assert "1 lines in files were no messages" in refused and "no line of the queue\\xff" in refused
    assert "8 of 8 accepted messages are in the view, each once" in run.text
