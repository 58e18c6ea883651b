"""The columns of the view tables, word for word: what a table was made with it keeps."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import pyarrow as pa
import pytest

from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Moment
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES, VIEWS, settle
from schemas.tables.arrow_tables import VIEW_ARROW
from tests.schemas.hub_records import HUB_GOOD
from tests.schemas.job_records import KEYRING, document_record
from tests.schemas.stream_records import GOOD

POSITION = "partition int32!, last_offset int64!"
# `!`: never null.
COLUMNS = {
    "registry_jobs": (
        "job_id string!, status string!, description string!, session_wanted string, session string, "
        "registered_by string!, registered_at time!, picked_at time, started_at time, ended_at time, "
        "ended_by string, last_seq int64!, last_event string, last_detail string, events int64!, notify texts, "
        "secret_rotations int64, old_secret_ends_at time"
    ),
    "registry_sessions": (
        "session string!, status string!, description string!, host string, handle string, for_job string, "
        "job_id string, jobs_ended int64!, created_by string!, created_at time!, stopped_at time, "
        "reason string, capture_id string"
    ),
    "registry_principals": (
        "principal string!, role string!, status string!, token_sha256 string!, added_by string!, "
        "added_at time!, revoked_at time"
    ),
    "registry_tasks": (
        "task_id string!, status string!, description string!, agent_name string!, token_id string, "
        "session_name string, result string, error string, submitted_by string!, submitted_at time!, "
        "started_at time, ended_at time, ended_by string, image string"
    ),
    "registry_tokens": (
        "token_id string!, token_sha256 string!, agent_name string!, task_id string!, capabilities texts!, "
        "status string!, issued int64!, expiry int64!, revoked_at time, revoked_why string"
    ),
    "registry_agents": (
        "agent_name string!, status string!, image string!, description string!, capabilities texts!, "
        "hardened bool!, defined_at time!, removed_at time"
    ),
    "registry_containers": (
        "container string!, state string!, task_id string!, agent_name string!, backend string!, host string, "
        "handle string, port int64, error string, created_at time!, changed_at time!"
    ),
    "registry_topics": (
        "topic string!, subscribers int64!, created_by string!, created_at time!, publications int64!, "
        "undelivered int64!, last_message_id string, last_published_at time"
    ),
    "registry_subscriptions": (
        "topic string!, subscriber string!, status string!, since time!, subscribed_by string!, until time, "
        "unsubscribed_by string"
    ),
    "topic_messages": (
        "topic string!, message_id string!, status string!, sender string!, kind string!, "
        "recipient_count int64!, recipients texts, published_at time!, published_offset int64!, "
        "delivered_at time, blob string, refused_count int64!, refused texts"
    ),
    "registry_schedules": (
        "schedule string!, status string!, owner string!, from_task string, cron string, every_s int64, "
        "recipient string!, kind string!, body string!, content_type string!, priority string!, "
        "expires_in_ms int64, missed string!, revision int64!, set_at time!, next_run_at time, "
        "last_run_at time, runs int64!, missed_runs int64!, late_runs int64!, removed_at time, "
        "refused_run_at time, refused_reason string"
    ),
    "blobs": (
        "digest string!, status string!, bytes int64!, content_type string!, object string!, "
        "stored_by string!, stored_at time!, keep_s int64!, keep_until time!, removed_at time"
    ),
    "registry_webhooks": (
        "webhook string!, status string!, url string!, topic string, set_by string!, set_at time!, "
        "revision int64!, changed_at time!, why_paused string, old_secret_ends_at time"
    ),
    "registry_participants": (
        "agent_name string!, status string!, task string!, capabilities texts!, task_id string, "
        "started_at time!, updated_at time!, stopped_at time, stopped_why string"
    ),
    "registry_keys": (
        "agent_name string!, key_id string!, public_key string!, status string!, registered_at time!, "
        "valid_until time, removed_at time"
    ),
    "registry_mqtt_agents": (
        "agent_name string!, status string!, registered_by string!, registered_at time!, removed_at time, "
        "last_seq int64!, messages int64!, last_said_at time"
    ),
    "registry_listeners": (
        "listener string!, status string!, type string!, capability string!, root_tag string!, "
        "namespace string!, handler string, xsd string, example string, visible_tools texts, "
        "concurrency int64!, per_minute int64, tokens_per_minute int64, timeout_ms int64!, options string, "
        "added_at time!, removed_at time"
    ),
    "registry_limits": (
        "scope string!, name string!, pending_most int64, bytes_most int64, messages_per_minute int64, "
        "bytes_per_minute int64, limited_by string!, limited_at time!, live_jobs_most int64, "
        "subscriptions_most int64"
    ),
    "registry_threads": (
        "thread string!, parent_thread string!, root_thread string!, opened_by string!, seen_by string!, "
        "on_behalf_of string!, kind string!, message_id string!, opened_at time!"
    ),
    "message_bodies": (
        "realm string!, recipient string!, message_id string!, body string!, content_type string!, "
        "blob_bytes int64, blob_type string"
    ),
    "mailbox": (
        "realm string!, recipient string!, message_id string!, status string!, sender string!, "
        "from_verified bool!, from_task string, kind string!, priority string!, in_reply_to string, "
        "thread string, broadcast_id string, sent_at string, expires_at string, posted_at time!, "
        "attempts int64!, handed_to string, handed_at time, request_id string, lease_until time, "
        "ended_at time, parent_thread string, root_thread string, on_behalf_of string, "
        "last_reason string, replay_of string, deliver_at time, topic string, blob string, hops int64, "
        "subject string"
    ),
    "mailbox_limits": (
        "realm string!, recipient string!, pending_most int64, bytes_most int64, limited_by string!, "
        "limited_at time!"
    ),
    "stream_entries": (
        "stream_kind string!, stream_id string!, entry string!, value binary!, fold_version int32!"
    ),
}
KEYS = {
    "registry_jobs": ("job_id",),
    "registry_sessions": ("session",),
    "registry_principals": ("principal",),
    "registry_tasks": ("task_id",),
    "registry_tokens": ("token_id",),
    "registry_agents": ("agent_name",),
    "registry_containers": ("container",),
    "registry_topics": ("topic",),
    "registry_subscriptions": ("topic", "subscriber"),
    "topic_messages": ("topic", "message_id"),
    "registry_schedules": ("schedule",),
    "blobs": ("digest",),
    "registry_webhooks": ("webhook",),
    "registry_participants": ("agent_name",),
    "registry_keys": ("agent_name", "key_id"),
    "registry_mqtt_agents": ("agent_name",),
    "registry_listeners": ("listener",),
    "registry_limits": ("scope", "name"),
    "registry_threads": ("thread",),
    "mailbox_limits": ("realm", "recipient"),
    "message_bodies": ("realm", "recipient", "message_id"),
    "mailbox": ("realm", "recipient", "message_id"),
}


def described(schema: pa.Schema) -> str:
    """A schema in the words of COLUMNS."""
    names = {pa.timestamp("us", tz="UTC"): "time", pa.list_(pa.string()): "texts"}
    return ", ".join(f"{f.name} {names.get(f.type, f.type)}{'' if f.nullable else '!'}" for f in schema)


@pytest.mark.parametrize("table", VIEW_TABLES)
def test_a_table_has_these_columns_and_the_place_in_the_log_at_the_end(table: str) -> None:
    assert described(VIEW_ARROW[table]) == f"{COLUMNS[table]}, {POSITION}"


def test_the_tables_are_the_views_and_the_entries_come_last() -> None:
    assert tuple(COLUMNS) == VIEW_TABLES
    assert VIEW_TABLES[-1] == STREAM_ENTRIES
    assert {name: view.KEY for name, view in VIEWS.items()} == KEYS
    assert all(name == view.VIEW for name, view in VIEWS.items())


@pytest.mark.parametrize("name", VIEWS)
def test_a_key_is_made_of_columns_that_are_text_and_never_null(name: str) -> None:
    for column in VIEWS[name].KEY:
        assert VIEW_ARROW[name].field(column).type == pa.string()
        assert not VIEW_ARROW[name].field(column).nullable


def changes() -> list[AppliedChange]:
    """Every change that the good records make, one stream after another."""
    streams: dict[bytes, Entries] = {}
    found = []
    for offset, (record_type, (key, body)) in enumerate((GOOD | HUB_GOOD).items()):
        record = document_record(body, record_type, key=key, ce_id=f"id {offset}", offset=offset)
        settled = settle(record, streams.setdefault(key, Entries()), KEYRING, Entries())
        found += [AppliedChange(c.view, c.key, offset, c.row) for c in settled.changes]
    return found


def test_the_good_records_change_every_view() -> None:
    assert {change.view for change in changes()} == set(VIEWS)


@pytest.mark.parametrize("change", changes(), ids=lambda c: f"{c.view} {c.offset}")
def test_a_change_is_for_the_view_of_its_row_under_the_key_of_its_row(change: AppliedChange) -> None:
    view = VIEWS[change.view]
    assert change.row is not None
    assert type(change.row) is view
    assert change.row.key == change.key


@pytest.mark.parametrize("change", changes(), ids=lambda c: f"{c.view} {c.offset}")
def test_a_row_survives_the_ledgers_json_and_fits_into_its_table(change: AppliedChange) -> None:
    view = VIEWS[change.view]
    document = msgspec.json.decode(msgspec.json.encode([change]))[0]
    assert msgspec.convert(document["row"], view) == change.row
    assert (document["view"], document["key"], document["offset"]) == (change.view, change.key, change.offset)
    row = {**document["row"], "partition": 1, "last_offset": change.offset}
    assert list(row) == VIEW_ARROW[change.view].names
    batch = pa.RecordBatch.from_pylist([row], schema=VIEW_ARROW[change.view])
    batch.validate(full=True)
    assert as_numbers(batch.to_pylist()[0], view) == document["row"]


def as_numbers(row: dict[str, Any], row_type: type) -> dict[str, Any]:
    """A table's row as the struct has it: times in microseconds, no place in the log."""
    hints = get_type_hints(row_type, include_extras=True)
    times = {name for name, hint in hints.items() if hint in (Moment, Moment | None)}
    return {
        name: round(row[name].timestamp() * 10**6) if name in times and row[name] is not None else row[name]
        for name in row_type.__struct_fields__
    }
