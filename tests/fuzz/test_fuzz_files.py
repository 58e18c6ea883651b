"""Files that others write: lines of the queue, cursors, audits, definitions, the audit chain."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from connectors.doors.file_bridge import records
from connectors.doors.file_bridge.records import AuditPlace, Progress, read_polls
from connectors.hub.launcher.launch_spec import AGENT_TOKEN_VARIABLE, LaunchSpec, read_launchers
from connectors.hub.launcher.local_processes import LocalProcessLauncher
from connectors.hub.organism.declared_files import DEFINITION_BYTES, read_definitions
from connectors.hub.organism.organism_file import OrganismError, parsed
from schemas.integrity import audit_chain
from schemas.integrity.audit_anchors import is_signed_by, key_id, read_anchors, sign_statement, statement_of
from schemas.settings.settings import Settings, SettingsError
from tests.fuzz.fuzzing import fuzzed, mutated, mutated_json, mutated_text, other_numbers
from trunkline_agent.queue import QueueError
from trunkline_agent.queue.cursors import SUFFIX, all_cursors, read_cursor
from trunkline_agent.queue.expiry import finish_expire, names_in
from trunkline_agent.queue.message_record import (
    blob_file_of,
    blob_in_line,
    is_expired,
    is_name,
    parse_line,
    side_file_of,
    to_line,
)
from trunkline_agent.queue.session_files import CURSORS, PLAN, SessionFolder
from trunkline_agent.wire.ids import parse_stream_key

LINE = {
    "msg_id": "m1",
    "ts": "2026-01-01T00:00:00.000001Z",
    "from": "ann",
    "to": "bo",
    "topic": "ask",
    "body": "hello",
    "in_reply_to": None,
    "ttl_s": 60.5,
}
LINES = (
    LINE,
    {**LINE, "to": None},
    {**LINE, "to": "all"},
    {**LINE, "body": "@file:m1.txt", "ttl_s": None},
    {**LINE, "blob": blob_in_line("m1", "ab" * 32, 5, "image/png", is_gone=False)},
)
ESCAPED = to_line(LINE).strip().replace(b'"m1"', b'"\\u006d1"')
OWN_LINES = mutated(ESCAPED, *(to_line(line).strip() for line in LINES))


@pytest.mark.long
@pytest.mark.requirement("FQ-05")
@pytest.mark.requirement("FQ-15")
@fuzzed(st.one_of(mutated_json(*LINES), OWN_LINES), examples=150)
def test_a_line_of_the_queue_is_a_message_or_nothing_and_the_bridge_can_tell(case: bytes) -> str:
    """A message can be written and read again and has its posting, and no short cut misses it."""
    found = parse_line(case)
    names = names_in(case, found)
    assert all(is_name(name.removesuffix(".txt")) and "/" not in name for name in names)
    assert parse_stream_key(records.refusal_of("s", case).key) == ("refused", "file")
    if found is None:
        return "nothing"
    assert parse_line(to_line(found).rstrip(b"\n")) == found
    assert is_expired(found, 1e12) in (True, False)
    assert {side_file_of(found), blob_file_of(found)} - {None} == names
    if records.is_to_everybody(found):
        assert records.may_be_to_everybody(case)
    assert records.may_be_of(case, {found["msg_id"]})
    records.sent_at_s(found)
    try:
        record = records.posting_of(found, "s", "bo")
    except ValueError:
        return "a message for files alone"
    assert parse_stream_key(record.key) == ("mailbox", "s/bo")
    return "a message"


EXPIRE_PLAN = {"removed": 3, "cursors": {"ann": 512, "bo": 0}, "side_files": ["m1.txt"]}


@fuzzed(mutated_json(EXPIRE_PLAN))
def test_a_plan_of_an_expire_is_carried_out_or_stays_with_an_error_that_says_what_to_do(case: bytes) -> str:
    """It moves cursors and deletes files: what is none must do neither, anywhere."""
    with TemporaryDirectory() as root, SessionFolder(root, "s", create=True) as folder:
        plan, other = Path(folder.path) / PLAN, Path(folder.path).parent / "m1.txt"
        plan.write_bytes(case)
        other.write_text("somebody else's")
        try:
            found = finish_expire(folder, lambda step: None)
        except QueueError:
            assert plan.read_bytes() == case and all_cursors(folder) == {}
            return "refused"
        finally:
            assert other.exists()
        assert not plan.exists() and found == json.loads(case)["removed"]
        assert all_cursors(folder) == json.loads(case)["cursors"]
        return "carried out"


@pytest.mark.requirement("FQ-04")
@fuzzed(mutated(b"%019d\n" % 512, b"0\n", b"77", b"0077\n", b" 77\n"))
def test_a_cursor_is_an_offset_or_an_error_that_says_what_to_do(case: bytes) -> str:
    """To begin anew would deliver twice, to go to the end would lose."""
    with TemporaryDirectory() as root, SessionFolder(root, "s", create=True) as folder:
        (Path(folder.path) / CURSORS).mkdir(exist_ok=True)
        (Path(folder.path) / CURSORS / f"ann{SUFFIX}").write_bytes(case)
        try:
            found = read_cursor(folder, "ann")
        except QueueError:
            assert all_cursors(folder) == {"ann": None}
            return "refused"
        assert found is not None
        assert case in (b"%019d\n" % found, b"%d" % found, b"%d\n" % found)
        assert all_cursors(folder) == {"ann": found}
        return "an offset"


POLL = {"ts": "2026-01-01T00:00:00Z", "op": "poll", "session": "s", "agent_id": "ann", "msg_ids": ["m1", "m2"]}


@pytest.mark.long
@pytest.mark.requirement("FQ-16")
@fuzzed(st.lists(mutated_json(POLL), min_size=1, max_size=3), examples=100)
def test_a_forged_line_of_the_audit_is_passed_over_and_the_place_goes_on(case: list[bytes]) -> str:
    """Each line that is read as a poll has claims that can be written."""
    with TemporaryDirectory() as root:
        content = b"".join(line + b"\n" for line in case)
        (Path(root) / "audit.jsonl").write_bytes(content)
        read = read_polls(root, AuditPlace())
        assert read.place.offset == len(content)
        assert read_polls(root, read.place).polls == []
    for poll in read.polls:
        for claim in records.claims_of(poll):
            assert parse_stream_key(claim.key) == ("mailbox", f"{poll['session']}/{poll['agent_id']}")
            assert claim.headers()
    return f"{len(read.polls)} polls"


PROGRESS = {"served": {"s": ["ann", "bo"]}, "audit": [12, 345]}
PLACES = st.sampled_from([b"[1e999,0]", b"[0,-5]", b"[0,%d]" % 10**40, b"[]", b"{}", b"[1.5,1]", b'["1","2"]'])


@pytest.mark.long
@fuzzed(mutated_json(PROGRESS) | PLACES.map(lambda place: b'{"served":{},"audit":%b}' % place), examples=100)
def test_a_progress_of_the_bridge_that_nobody_can_read_begins_anew(case: bytes) -> str:
    """It is carried again and settles as duplicates; the bridge does not stop."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "progress.json"
        path.write_bytes(case)
        found = Progress.load(path)
        found.save(path)
        assert Progress.load(path) == found
        audit = Path(folder) / "audit.jsonl"
        audit.write_bytes(json.dumps(POLL).encode() + b"\n")
        place = AuditPlace(audit.stat().st_ino, found.audit.offset)
        assert read_polls(folder, place).place.offset == audit.stat().st_size
    return "nothing" if found == Progress() else "a progress"


DEFINITION = {"name": "nova", "image": "sample", "description": "x", "capabilities": ["a"], "hardened": True}


@pytest.mark.long
@pytest.mark.requirement("HH-01")
@fuzzed(mutated_json(DEFINITION) | st.just(b" " * (DEFINITION_BYTES + 1)), examples=100)
def test_a_definition_is_taken_whole_or_named_as_a_fault(case: bytes) -> str:
    """Never raises, and what is said of a fault can be printed."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "a.json").write_bytes(case)
        found = read_definitions(Path(folder))
    assert len(found.agents) + len(found.faults) == 1
    for name, agent in found.agents.items():
        assert name == agent.name
        assert is_name(name)
        return "an agent"
    assert list(found.faults) == ["a.json"]
    assert found.faults["a.json"].isprintable()
    return "a fault"


ORGANISM = b"""listeners:
  - {name: calculator, handler: "a.b:c", tools: [bo], timeout_s: 1.5, concurrency: 2, per_minute: 60}
  - name: bo
    type: human
agents:
  - {name: nova, root_tag: ask, namespace: "urn:x:1", model: m, client: "a:b", system_prompt: "x\\ty"}
meta: {allow_list_capabilities: all}
"""
LAUNCHERS = b"""sample:
  command: ["{python}", -m, connectors.tools.samples.sample_agent]
  environment: {A: b}
  cpu_seconds: 10
"""
# Values that YAML does not read as text, right and wrong; each replaces a value once.
VALUES = st.sampled_from(
    [
        *(
            b"!!int ''",
            b"!!int x",
            b"!!float ''",
            b"!!bool x",
            b"!!timestamp x",
            b"!!binary x",
            b"!!null x",
            b"!!set x",
        ),
        *(
            b"2026-13-45",
            b"12:30:45",
            b"0x1F",
            b"0o7",
            b"1_0",
            b".inf",
            b".nan",
            b"~",
            b"=",
            b"<<",
            b"? {}",
            b"{[]: 1}",
        ),
        *(
            b"&a [*a]",
            b"*a",
            b"!!python/object/apply:os.getcwd []",
            b"!x y",
            b"{<<: {a: 1}}",
            b"|\n  x",
            b"'\\ud800'",
        ),
    ]
)


def _filled(seed: bytes, *places: bytes) -> st.SearchStrategy[bytes]:
    """The seed with one of these values of its replaced."""
    return st.tuples(st.sampled_from(places), VALUES).map(lambda pair: seed.replace(pair[0], pair[1], 1))


@pytest.mark.requirement("XP-09")
@fuzzed(
    mutated(ORGANISM) | _filled(ORGANISM, b"calculator", b"1.5", b"[bo]", b"2", b"human", b"all"), examples=100
)
def test_an_organism_is_taken_or_refused_with_its_place(case: bytes) -> str:
    """YAML that nobody can build anything of is an OrganismError, too."""
    try:
        plan = parsed(case, Path("organism.yaml"))
    except OrganismError as error:
        assert "organism.yaml" in str(error)
        return "refused"
    assert parsed(case, Path("organism.yaml")) == plan
    return "taken"


@pytest.mark.requirement("HH-05")
@fuzzed(mutated(LAUNCHERS) | _filled(LAUNCHERS, b"10", b"b", b"sample", b"-m", b"{A: b}"), examples=100)
def test_launchers_are_taken_or_refused_with_their_file(case: bytes) -> str:
    """A command that cannot be read starts nothing."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "launchers.yaml"
        path.write_bytes(case)
        try:
            rules = read_launchers(path)
        except SettingsError as error:
            assert "launchers.yaml" in str(error)
            return "refused"
    assert all(rule.filled_command() for rule in rules.values())
    return f"{len(rules)} rules"


RUN = {"handle": "process/1/77-0a1b2c3d", "container": "nova-1", "task_id": "t1"}
SPEC = {"container": "c", "task_id": "t", "agent_name": "a", "image": "i", "description": "d"}


@pytest.mark.long
@pytest.mark.requirement("HH-05")
@fuzzed(st.tuples(mutated_json(RUN), mutated_text(RUN["handle"]), mutated_text("token=0a1b-0a1b")), examples=50)
def test_a_launcher_knows_its_own_handles_alone_and_shows_no_token(case: Any) -> str:
    """The launcher takes no foreign process for its own, for any content of run files and handles."""
    content, handle, said = case
    with TemporaryDirectory() as folder:
        launcher = LocalProcessLauncher(Settings(data_dir=Path(folder)), {})
        runs = Path(folder) / "run" / "agents"
        runs.mkdir(parents=True)
        (runs / "nova-1.json").write_bytes(content)
        assert launcher.alive(handle) is False
        found = launcher.find("nova-1")
        assert found is None or isinstance(found, str)
        assert found is None or launcher.alive(found) is False
    spec = LaunchSpec(**SPEC, environment={AGENT_TOKEN_VARIABLE: "0a1b", "OTHER": "token=0a1b"})
    assert "0a1b" not in spec.blanked(said)
    return "nothing" if found is None else "a run"


def _chain() -> audit_chain.ChainLine:
    roots = [audit_chain.partition_root(0, (0, 1), [b"a" * 32, b"b" * 32])]
    entry = audit_chain.next_entry(audit_chain.FirstEntry("t", {}), "q", 0, [audit_chain.roots_text(roots)])
    return audit_chain.ChainLine(3, entry.value(), entry)


CHAIN = _chain()
ANCHOR_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ANCHOR = sign_statement(statement_of(CHAIN.entry, 5), ANCHOR_KEY)
COMMIT = {"commitInfo": {"userMetadata": json.dumps({"audit": audit_chain.commit_metadata(CHAIN.entry)})}}


def _lines(good: bytes) -> st.SearchStrategy[bytes]:
    """Generate contents of a file of such lines: a mutated line, or a whole line of changed JSON."""
    document = json.loads(good)
    spaces = st.integers(1, 20).map(" ".__mul__)
    other_words = spaces.map(lambda gap: json.dumps(document, separators=(f",{gap}", ":")).encode())
    whole = st.one_of(mutated_json(document), other_numbers(document), other_words)
    return st.one_of(mutated(good), whole.map(lambda raw: raw + b"\n"))


@pytest.mark.long
@fuzzed(_lines(CHAIN.text()), examples=200, wanted=("the entry", "another entry", "none"))
def test_a_line_of_the_audit_chain_is_an_entry_or_none(case: bytes) -> str:
    """The file may contain anything; the reader returns only numbers and hashes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "chain.jsonl"
        path.write_bytes(case)
        found = list(audit_chain.lines_in_file(path))
        last = audit_chain.last_in_file(path)
    good = [line for line in found if line is not None]
    assert (good[-1] if good else None) == last
    for line in good:
        assert (line.entry.value() == line.value) == (line.entry == CHAIN.entry and line.value == CHAIN.value)
        assert line.text() and audit_chain.commit_root(line.entry.partitions)
    if not good:
        return "none"
    return "the entry" if CHAIN in good else "another entry"


@pytest.mark.long
@fuzzed(_lines(ANCHOR.text()), examples=200, wanted=("signed", "signed, in other words", "forged", "refused"))
def test_an_anchor_counts_when_it_says_what_was_signed(case: bytes) -> str:
    """A changed one is refused or cannot be read."""
    keys = {key_id(ANCHOR_KEY.public_key()): ANCHOR_KEY.public_key()}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "anchors.jsonl"
        path.write_bytes(case)
        found = read_anchors(path)
    signed = [anchor for anchor in found if anchor is not None and is_signed_by(anchor, keys)]
    assert all(anchor.statement == ANCHOR.statement for anchor in signed)
    if signed:
        return "signed" if case.strip() == ANCHOR.text().strip() else "signed, in other words"
    return "forged" if any(found) else "refused"


METADATA = {"audit": audit_chain.commit_metadata(CHAIN.entry)}


@pytest.mark.long
@fuzzed(
    mutated(json.dumps(COMMIT).encode())
    | st.one_of(mutated_json(METADATA), other_numbers(METADATA)).map(
        lambda raw: json.dumps({"commitInfo": {"userMetadata": raw.decode("utf-8", "replace")}}).encode()
    ),
    examples=150,
    wanted=("the entry", "another entry", "none"),
)
def test_a_commit_of_the_table_has_an_entry_or_none(case: bytes) -> str:
    """The table's log is written by whoever can write to the table."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "_delta_log" / f"{7:020d}.json"
        path.parent.mkdir()
        path.write_bytes(case)
        found = audit_chain.line_in_commit(SubTreeFileSystem(folder, LocalFileSystem()), 7)
    assert found is None or found.version == 7
    if found is None:
        return "none"
    assert found.text()
    return "the entry" if found.entry == CHAIN.entry else "another entry"
