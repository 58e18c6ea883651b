"""Each audit notebook stops, and says why, when a table contradicts another: Delta tables, written wrongly.

The custody notebook's damage is in tests/test_demo.py: there a byte is changed in the file of a table.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from jobs.rebuild_views import rebuild
from jobs.settling.fold_run import settle_run
from schemas.fold.entries import Entries
from schemas.settings.settings import Settings
from schemas.streams.agents.agent_registry import (
    REGISTRY_KEYS,
    REGISTRY_PARTICIPANTS,
    AgentJoined,
    AgentKeyRegistered,
    AgentKeyRemoved,
    AgentStopped,
)
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.mailboxes.message import MAILBOX_VIEW, Message
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.ledger import LEDGER, LedgerRow
from schemas.wire.record import OutgoingRecord
from tests.connectors.ledger_tables import FIRST_MOMENT_US, KEYRING, STEP_US, settings_below
from tests.jobs.topic_load import event, raw_event, registration
from tests.notebook_run import run_here
from tests.schemas.hub_records import public_key
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.signing import key_id_of

JOB, OTHER_JOB = "ab12cd34", "ffffffff"
OLD, NEW, BOBS, FORGED = (public_key(seed) for seed in ("old", "new", "bob's", "forged"))
BY = {"door": "http", "principal": "operator"}


def joined(name: str, key: str) -> OutgoingRecord:
    """An agent takes part."""
    body = AgentJoined(agent_name=name, request_id="j", task="count", capabilities=[], public_key=key)
    return body.record(**BY)


def posted(message_id: str) -> OutgoingRecord:
    """A message from ann to bob."""
    said = {"message_id": message_id, "from": "ann", "to": "bob", "kind": "ask", "body": "{}"}
    return Message.model_validate(said).record(**BY)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Tables as jobs write them: two jobs, one forged event, two agents of whom one has stopped, three keys."""
    settings = settings_below(tmp_path_factory.mktemp("sound"))
    honest = event(JOB, 1, "started")
    forged = raw_event(JOB, honest.value.replace(b"going on", b"forged!!"))
    bodies = (
        AgentKeyRegistered(agent_name="ann", request_id="k", public_key=NEW, overlap_ms=60_000),
        AgentKeyRemoved(agent_name="ann", request_id="r", key_id=key_id_of(OLD)),
        AgentStopped(agent_name="bob", request_id="s"),
    )
    sent = (
        *(registration(job, KEYRING) for job in (JOB, OTHER_JOB)),
        *(forged, honest, event(JOB, 2)),
        *(joined("ann", OLD), joined("bob", BOBS), posted("m1"), posted("m2")),
        *(body.record(**BY) for body in bodies),
    )
    write_deltalake(settings.table_path(LEDGER), ledger_batch(settled(sent)))
    rebuild(settings)
    return settings


def settled(sent: Sequence[OutgoingRecord]) -> list[LedgerRow]:
    """The rows that the job makes of these records in one micro-batch, a second apart."""
    records = [
        as_read(one, offset, FIRST_MOMENT_US + offset * STEP_US, partition=0) for offset, one in enumerate(sent)
    ]
    return settle_run(records, lambda _: Entries(), KEYRING)


class Damage(NamedTuple):
    """One table written wrongly, and what the notebook must say of it."""

    notebook: str
    table: str
    write: Callable[[DeltaTable], object]
    told: str


def changed(predicate: str, **cells: str) -> Callable[[DeltaTable], object]:
    """Rows with other cells, given as SQL."""
    return lambda table: table.update(updates=cells, predicate=predicate)


def removed(predicate: str) -> Callable[[DeltaTable], object]:
    """Rows taken out."""
    return lambda table: table.delete(predicate)


def doubled(table: DeltaTable) -> None:
    """All rows twice."""
    write_deltalake(table, table.to_pyarrow_table(), mode="append")


def unheard_of_reason(table: DeltaTable) -> None:
    """Every refusal with a reason that there is not. Delta's own update would change types, too."""
    rows = table.to_pyarrow_table()
    place = rows.schema.get_field_index("reason")
    reasons = [None if reason is None else "bad_luck" for reason in rows["reason"].to_pylist()]
    write_deltalake(table, rows.set_column(place, rows.schema.field(place), [reasons]), mode="overwrite")


DAMAGES = {
    "a job ended that has not": Damage(
        "job_audit", REGISTRY_JOBS, changed(f"job_id = '{JOB}'", status="'completed'"), f"differ.*{JOB}"
    ),
    "a job is gone": Damage(
        "job_audit", REGISTRY_JOBS, removed(f"job_id = '{JOB}'"), f"not in the registry: .*{JOB}"
    ),
    "a job was made up": Damage(
        "job_audit", REGISTRY_JOBS, changed(f"job_id = '{JOB}'", job_id="'00000000'"), "not know .*00000000"
    ),
    "a record is gone": Damage("job_audit", LEDGER, removed('"offset" = 3'), "an offset is missing"),
    "records stand twice": Damage("job_audit", LEDGER, doubled, "stands in the ledger twice"),
    "a message is gone": Damage(
        "message_audit", MAILBOX_VIEW, removed("message_id = 'm1'"), "1 accepted messages are not in the table"
    ),
    "a message was made up": Damage(
        "message_audit", MAILBOX_VIEW, changed("message_id = 'm1'", message_id="'m9'"), "nobody posted"
    ),
    "messages stand twice": Damage("message_audit", MAILBOX_VIEW, doubled, "stands in the table twice"),
    "a refused record has made a row": Damage(
        "refusal_audit",
        REGISTRY_JOBS,
        changed(f"job_id = '{JOB}'", last_offset="2"),
        f"a refused record has made a row of {REGISTRY_JOBS}",
    ),
    "a reason was made up": Damage("refusal_audit", LEDGER, unheard_of_reason, "nobody knows"),
    "who has stopped is there again": Damage(
        "agent_audit",
        REGISTRY_PARTICIPANTS,
        changed("agent_name = 'bob'", status="'idle'"),
        r"left them as .*\['bob'\]",
    ),
    "an agent was made up": Damage(
        "agent_audit",
        REGISTRY_PARTICIPANTS,
        changed("agent_name = 'bob'", agent_name="'eve'"),
        r"left them as .*\['eve'\]",
    ),
    "an agent is gone": Damage(
        "agent_audit",
        REGISTRY_PARTICIPANTS,
        removed("agent_name = 'bob'"),
        r"does not have them: \['bob'\]",
    ),
    "a key was put in": Damage(
        "agent_audit",
        REGISTRY_KEYS,
        changed(f"key_id = '{key_id_of(NEW)}'", public_key=f"'{FORGED}'", key_id=f"'{key_id_of(FORGED)}'"),
        r"never registered for these agents: \['ann'\]",
    ),
    "a key is somebody else's": Damage(
        "agent_audit",
        REGISTRY_KEYS,
        changed("agent_name = 'bob'", agent_name="'ann'"),
        r"never registered for these agents: \['ann'\]",
    ),
    "a key is gone": Damage(
        "agent_audit", REGISTRY_KEYS, removed("agent_name = 'bob'"), r"not in the registry: \['bob'\]"
    ),
    "a key has another's id": Damage(
        "agent_audit",
        REGISTRY_KEYS,
        changed("agent_name = 'bob'", key_id=f"'{key_id_of(NEW)}'"),
        r"ids of keys .*\['bob'\]",
    ),
    "a key that was removed is good again": Damage(
        "agent_audit",
        REGISTRY_KEYS,
        changed(f"key_id = '{key_id_of(OLD)}'", status="'active'"),
        r"left their keys .*\['ann'\]",
    ),
}


@pytest.mark.parametrize(
    ("name", "checked"),
    [
        ("job_audit", "2 of 2 registry rows stand at the ledger's end and agree with it"),
        ("message_audit", "2 of 2 accepted messages are in the view, each once"),
        ("refusal_audit", "was made by one of 1 refused records"),
        ("agent_audit", "2 agents that took part and 3 keys stand as the ledger has them"),
    ],
)
def test_over_sound_tables_a_notebook_says_at_its_end_what_it_has_checked(
    name: str, checked: str, sound: Settings, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked in run_here(name, sound, monkeypatch).text


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_notebook_stops_at_its_check_when_a_table_contradicts_the_others(
    damage: Damage, sound: Settings, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = settings_below(tmp_path / "damaged")
    shutil.copytree(sound.data_path, damaged.data_path)
    damage.write(DeltaTable(damaged.table_path(damage.table)))
    with pytest.raises(AssertionError, match=damage.told):
        run_here(damage.notebook, damaged, monkeypatch)
