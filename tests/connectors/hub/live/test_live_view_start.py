"""The live view's start from the Delta view tables, made here by an independent fold."""

from __future__ import annotations

import importlib
import random
from contextlib import contextmanager

import pytest
from deltalake import DeltaTable, write_deltalake

from connectors.hub.live.live_view import LiveView
from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION
from schemas.state_store import gateway_store
from schemas.state_store.ended_lists import WHOLE
from schemas.state_store.gateway_store import GatewayStore
from schemas.streams.agents.agent_registry import AgentJoined
from schemas.streams.fold import STREAM_ENTRIES, VIEWS, settle
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.mailboxes.mailbox_bodies import MailboxClearing
from schemas.streams.mailboxes.message import MESSAGE_FINAL, MessageBodyRow, MessageRow
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.ledger import LEDGER, ledger_row
from schemas.tables.view_progress import read_progress
from schemas.wire.record import Position
from tests.connectors.folded_log import FoldedLog
from tests.connectors.hub.live.local_stores import entries_of, loaded_state, rows_of, streams_of
from tests.connectors.hub.live.test_live_view import assert_agrees, first_records_of, opened
from tests.random_log import trouble
from tests.raw_records import Raw, append_raw
from tests.schemas.hub_records import public_key
from trunkline_agent.errors import BackboneUnreachable, TrunklineError


@pytest.fixture
def log(backbone_settings, keyring):
    """All records of a log full of trouble, by partition and offset."""
    records = first_records_of(backbone_settings)
    records += append_raw(backbone_settings, trouble(800, keyring, seed=7))
    return sorted(records, key=lambda record: (record.partition, record.offset))


def folded_until(records, keyring, offsets) -> FoldedLog:
    """The fold of everything below these offsets."""
    folded = FoldedLog(keyring)
    for record in records:
        if record.offset < offsets.get(record.partition, 0):
            folded.add(record)
    return folded


def cuts(records, seed=1) -> list[dict[int, int]]:
    """Offsets in the log: somewhere, somewhere later, and the end; one partition is not in the first."""
    ends = {record.partition: record.offset + 1 for record in records}
    rng = random.Random(seed)
    late = {number: rng.randrange(end // 2, end) for number, end in ends.items()}
    early = {number: rng.randrange(0, end + 1) for number, end in late.items() if number != 0}
    return [early, late, ends]


@contextmanager
def watched(settings, keyring):
    """An open live view and the changes that it told."""
    told = []
    view = LiveView(settings, keyring)
    view.on_change(told.append)
    try:
        view.open()
        yield view, told
    finally:
        view.close()


@pytest.mark.requirement("CM-04")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_started_from_tables_with_the_rows_ahead_of_the_entries_it_agrees_with_the_whole_fold(
    backbone_settings, keyring, log, seed
):
    early, late, ends = cuts(log, seed)
    folded_until(log, keyring, early).write_entries(backbone_settings, early)
    folded_until(log, keyring, late).write_rows(backbone_settings)
    with watched(backbone_settings, keyring) as (view, told):
        assert_agrees(view, folded_until(log, keyring, ends))
        first = {(one.view, one.key): one.offset for one in reversed(told)}
        rows = folded_until(log, keyring, late).rows
        # Records that the tables already contained did not replace their rows in the meantime.
        assert all(offset >= rows[name][key][1] for (name, key), offset in first.items() if key in rows[name])


@pytest.mark.requirement("CM-04")
def test_entries_that_are_ahead_of_their_commits_offsets_are_not_applied_twice(backbone_settings, keyring, log):
    early, late, ends = cuts(log)
    folded = folded_until(log, keyring, late)
    folded.write_rows(backbone_settings)
    folded.write_entries(backbone_settings, early)
    with opened(backbone_settings, keyring) as view:
        assert_agrees(view, folded_until(log, keyring, ends))
        skipped = next(
            Position(record.partition, record.offset)
            for record in log
            if early.get(record.partition, 0) <= record.offset < late[record.partition]
            and folded.settled[record.partition, record.offset].verdict == "accepted"
        )
        with pytest.raises(BackboneUnreachable, match="ledger"):
            view.wait_settled(skipped, 0.2)


def test_a_maintenance_commit_after_the_newest_progress_does_not_hide_it(backbone_settings, keyring, log):
    early, _, ends = cuts(log)
    folded = folded_until(log, keyring, early)
    folded.write_entries(backbone_settings, early)
    folded.write_rows(backbone_settings)
    table = DeltaTable(backbone_settings.table_path(STREAM_ENTRIES))
    table.optimize.compact()
    table.alter.set_table_properties({"delta.checkpointInterval": "50"})
    with loaded_state(backbone_settings, keyring) as state:
        assert state.place.offsets == {0: 0, **early}
    with opened(backbone_settings, keyring) as view:
        assert_agrees(view, folded_until(log, keyring, ends))


def test_offsets_and_entries_are_of_one_version_while_the_table_grows(
    backbone_settings, keyring, log, monkeypatch
):
    early, late, _ = cuts(log)
    folded_until(log, keyring, early).write_entries(backbone_settings, early)
    folded = folded_until(log, keyring, late)
    folded.write_rows(backbone_settings)
    grown = []

    def read_while_it_grows(table):
        folded.write_entries(backbone_settings, late)
        grown.append(True)
        return read_progress(table)

    monkeypatch.setattr("connectors.hub.live.table_reader.read_progress", read_while_it_grows)
    with loaded_state(backbone_settings, keyring) as state:
        assert state.place.offsets == {0: 0, **early}
        assert entries_of(state) == folded_until(log, keyring, early).entries
    assert grown


@pytest.mark.requirement("ST-33")
@pytest.mark.parametrize("during", ["live_view.progress_of_tables", "live_store.load_views"])
def test_tables_that_grow_during_the_start_are_compared_with_the_log_as_it_is_then(
    backbone_settings, keyring, log, monkeypatch, during
):
    _, _, ends = cuts(log)
    folded = folded_until(log, keyring, ends)
    folded.write_entries(backbone_settings, ends)
    folded.write_rows(backbone_settings)
    module, name = during.split(".")
    read = getattr(importlib.import_module(f"connectors.hub.live.{module}"), name)

    def read_what_has_grown(*args):
        for record in append_raw(backbone_settings, trouble(100, keyring, seed=8)):
            folded.add(record)
        folded.write_entries(backbone_settings, folded.next_offsets)
        folded.write_rows(backbone_settings)
        return read(*args)

    monkeypatch.setattr(f"connectors.hub.live.{during}", read_what_has_grown)
    with opened(backbone_settings, keyring) as view:
        assert view._state.place.digests.keys() == ends.keys()
        assert_agrees(view, folded)


@pytest.mark.requirement("JE-17")
def test_verdicts_from_before_the_start_are_answered_from_the_ledger(backbone_settings, keyring, log):
    _, late, ends = cuts(log)
    folded = folded_until(log, keyring, late)
    folded.write_entries(backbone_settings, late)
    folded.write_rows(backbone_settings)
    whole = folded_until(log, keyring, ends)
    rows = [
        ledger_row(record, whole.settled[record.partition, record.offset], keyring)
        for record in log
        if record.offset < late[record.partition]
    ]
    expected = {}
    fresh = LiveView(
        backbone_settings.model_copy(update={"data_dir": backbone_settings.data_path / "none"}), keyring
    )
    try:
        fresh.open()
        for record in log:
            position = Position(record.partition, record.offset)
            expected[position] = fresh.wait_settled(position, 10)
    finally:
        fresh.close()
    write_deltalake(backbone_settings.table_path(LEDGER), ledger_batch(rows), mode="append")
    with opened(backbone_settings, keyring) as view:
        for record in log[::40]:
            position = Position(record.partition, record.offset)
            assert view.wait_settled(position, 10) == expected[position]


def test_tables_of_another_log_are_refused(backbone_settings, keyring, log):
    beyond = dict.fromkeys(range(4), 5000)
    folded = folded_until(log, keyring, beyond)
    folded.write_entries(backbone_settings, beyond)
    folded.write_rows(backbone_settings)
    with pytest.raises(TrunklineError, match="they are of another log"), opened(backbone_settings, keyring):
        pass


def test_missing_rows_and_tables_of_a_newer_fold_are_refused(backbone_settings, keyring, log):
    early, _, _ = cuts(log)
    folded = folded_until(log, keyring, early)
    folded.write_entries(backbone_settings, early)
    with (
        pytest.raises(TrunklineError, match=r"no rows in registry_.* rebuild_views"),
        loaded_state(backbone_settings, keyring),
    ):
        pass
    folded.write_rows(backbone_settings)
    table = DeltaTable(backbone_settings.table_path(STREAM_ENTRIES))
    table.update({"fold_version": str(FOLD_VERSION + 1)})
    with (
        pytest.raises(TrunklineError, match="start the newer program"),
        loaded_state(backbone_settings, keyring),
    ):
        pass


def joined() -> AgentJoined:
    """A participant, which nobody has defined."""
    return AgentJoined(
        agent_name="mara", request_id="j", public_key=public_key(), task="count", capabilities=["count"]
    )


@pytest.mark.parametrize("makes", ["an agent that is not defined here", "requests about an empty mailbox"])
def test_tables_are_whole_without_rows_where_none_are_due(backbone_settings, keyring, makes):
    if makes == "an agent that is not defined here":
        made = [joined().record(door="mcp", principal="mara")]
    else:
        made = [MailboxClearing(to="nobody", request_id="r").record(door="http", principal="operator")]
    sent = [Raw(record.key, record.value, record.headers()) for record in made]
    folded = FoldedLog(keyring)
    for record in append_raw(backbone_settings, sent):
        assert folded.add(record).verdict == "accepted"
    folded.write_entries(backbone_settings, {})
    folded.write_rows(backbone_settings)
    with loaded_state(backbone_settings, keyring) as state:
        assert streams_of(state) == [sent[0].key.decode()]


@pytest.mark.requirement("ST-31")
def test_only_the_newest_final_messages_are_loaded_and_the_bodies_of_the_loaded_ones(
    backbone_settings, keyring, log, monkeypatch
):
    _, _, ends = cuts(log)
    folded = folded_until(log, keyring, ends)
    folded.write_entries(backbone_settings, ends)
    folded.write_rows(backbone_settings)
    rows = [row for _, _, row in folded.rows[MessageRow.VIEW].values()]
    by_status = {one: sorted(row.ended_at for row in rows if row.status == one) for one in MESSAGE_FINAL}
    assert max(map(len, by_status.values())) > 1
    monkeypatch.setattr(gateway_store, "FINAL_MESSAGES_KEPT", 1)
    given: list[str] = []
    load = GatewayStore.load

    def counted(self, entries, rows):
        rows = list(rows)
        given.extend(key for view, key, _ in rows if view == MessageBodyRow.VIEW)
        load(self, entries, rows)

    monkeypatch.setattr(GatewayStore, "load", counted)
    with loaded_state(backbone_settings, keyring) as state:
        for status, ended in by_status.items():
            found = state.newest_ended(MessageRow.VIEW, status, WHOLE)
            assert [row.ended_at for row in found] == ended[::-1][:1]
        kept = {row.key for row in state.rows(MessageRow.VIEW)}
        assert len(kept) < len(rows)
        assert kept > {row.key for row in rows if row.is_live}
        bodies = {row.key for row in state.rows(MessageBodyRow.VIEW)}
        written = folded.rows[MessageBodyRow.VIEW].keys()
        assert kept & written == bodies
        # Messages that ended at the moment of the oldest one that is kept may be read, too.
        tied = {row.key for row in rows if not row.is_live and row.ended_at == by_status[row.status][-1]}
        assert bodies <= set(given) <= bodies | tied


def test_a_broken_table_is_a_clear_error_and_leaves_nothing_half_loaded(
    backbone_settings, keyring, log, monkeypatch
):
    monkeypatch.setattr("connectors.hub.live.table_reader._AGAIN_S", 0.0)
    early, _, _ = cuts(log)
    folded = folded_until(log, keyring, early)
    folded.write_entries(backbone_settings, early)
    folded.write_rows(backbone_settings)
    for file in (backbone_settings.data_path / "tables" / REGISTRY_JOBS).glob("*.parquet"):
        file.unlink()
    with pytest.raises(TrunklineError, match="cannot be read"), loaded_state(backbone_settings, keyring):
        pass


def test_without_tables_there_is_nothing_to_load(backbone_settings, keyring):
    with loaded_state(backbone_settings, keyring) as state:
        assert not any(state.place.offsets.values())
        assert streams_of(state) == []
        assert not any(rows_of(state).values())


def test_rows_and_entries_come_out_of_the_tables_as_they_were_put_in(backbone_settings, keyring, log):
    _, _, ends = cuts(log)
    folded = folded_until(log, keyring, ends)
    folded.write_entries(backbone_settings, ends)
    folded.write_rows(backbone_settings)
    with loaded_state(backbone_settings, keyring) as state:
        assert state.place.offsets == ends
        assert entries_of(state) == folded.entries
        assert not state.place.ahead
        assert rows_of(state) == {
            name: {key: (at, row) for key, (_, at, row) in folded.rows[name].items()} for name in VIEWS
        }
        # And the entries are usable: what was settled is a duplicate or refused as before.
        again = next(
            record for record in log if folded.settled[record.partition, record.offset].verdict == "accepted"
        )
        assert settle(again, state.entries(again.key.decode()), keyring, Entries()).verdict != "accepted"
