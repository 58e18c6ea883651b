"""Master keys change in the midst of a log: refold, views and the live view's fold stay what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from connectors.plumbing.tls_keys.master_keys import add_key, master_keys, rotate
from jobs.refold import ordered_rows
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring, load_keyring, sealed_by
from schemas.settings.settings import Settings
from schemas.streams.fold import settle
from schemas.streams.job.job_fold import job_grant
from schemas.tables.ledger import LEDGER, LedgerRow, record_of_row
from tests.jobs.test_rebuild_views import Backbone
from tests.jobs.topic_load import SECRET, event, registration

OLD_JOB, NEW_JOB = "0a1b2c3d", "4e5f6a7b"
UNSAFE = "sk-" + "a" * 40


def ledger_rows(settings: Settings) -> list[LedgerRow]:
    """All rows, by partition and offset."""
    return list(ordered_rows(DeltaTable(settings.table_path(LEDGER))))


@pytest.fixture
def rotated(tmp_path: Path) -> tuple[Backbone, Keyring, Keyring]:
    """A backbone whose master key was rotated between two micro-batches; the keyrings before and after."""
    made = Backbone(tmp_path / "data")
    before = made.keyring
    made.settle(registration(OLD_JOB, before), event(OLD_JOB, 1, "started", detail=UNSAFE))
    rotate(made.settings)
    made.keyring = after = load_keyring(made.settings)
    made.settle(
        registration(NEW_JOB, after),
        event(OLD_JOB, 2, "progress", detail=UNSAFE),
        event(NEW_JOB, 1, "started", detail=UNSAFE),
        event(OLD_JOB, 1, "started", detail=UNSAFE),
    )
    made.build()
    return made, before, after


@pytest.mark.long
@pytest.mark.requirement("CM-05")
def test_what_was_sealed_before_still_opens_and_what_comes_is_sealed_under_the_new_key(
    rotated: tuple[Backbone, Keyring, Keyring],
) -> None:
    backbone, before, after = rotated
    assert before.active != after.active and after.ids == (before.active, after.active)
    sealed = [row for row in ledger_rows(backbone.settings) if row.value_sealed is not None]
    assert {sealed_by(row.value_sealed or "") for row in sealed} == {before.active, after.active}
    for row in sealed:
        assert UNSAFE.encode() in (record_of_row(row, after).value or b"")
    assert sorted(row.verdict for row in sealed) == ["accepted", "accepted", "accepted", "duplicate"]


@pytest.mark.long
@pytest.mark.requirement("CM-04")
def test_a_refold_across_a_rotation_says_what_ledger_and_views_say(
    rotated: tuple[Backbone, Keyring, Keyring],
) -> None:
    backbone, _, _ = rotated
    found = backbone.check()
    assert (found.records, found.different, found.differences) == (6, 0, [])


@pytest.mark.long
@pytest.mark.requirement("CM-04")
def test_two_runners_agree_though_one_of_them_seals_under_the_key_of_before(
    rotated: tuple[Backbone, Keyring, Keyring],
) -> None:
    backbone, _, after = rotated
    not_yet = after.under(after.ids[0])
    streams: dict[bytes | None, tuple[Entries, Entries]] = {}
    for row in ledger_rows(backbone.settings):
        record = record_of_row(row, after)
        mine, other = streams.setdefault(record.key, (Entries(), Entries()))
        assert settle(record, mine, after, Entries()) == settle(record, other, not_yet, Entries())
        assert mine.take_writes() == other.take_writes()
    for job_id in (OLD_JOB, NEW_JOB):
        mine, _ = streams[f"job/{job_id}".encode()]
        grant = job_grant(job_id, mine, after)
        assert grant is not None and grant.secret == SECRET


@pytest.mark.requirement("CM-05")
def test_a_program_that_only_has_the_new_key_for_opening_is_ready_for_those_that_seal_under_it(
    tmp_path: Path,
) -> None:
    made = Backbone(tmp_path / "data")
    key_id = add_key(made.settings)
    ready = load_keyring(made.settings)
    assert (ready.active, ready.ids) == (made.keyring.active, (made.keyring.active, key_id))
    assert [key.is_active for key in master_keys(made.settings)] == [True, False]
    text = ready.under(key_id).seal(b"x", "p")
    assert ready.open(text, "p") == b"x" and sealed_by(text) == key_id
