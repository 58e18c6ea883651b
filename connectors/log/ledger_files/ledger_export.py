"""Rows of the ledger as lines, and the export of one job's history into a folder (JE-12).

Lines are aligned text for people, or JSON for programs. The folder gets meta.json, status.json and
events.ndjson. It needs neither gateway nor brokers. The folder appears whole or not at all, and is never
overwritten. Sealed secrets are left out, because an export is made to be handed on.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import JOB_EVENT, JOB_REGISTERED, REGISTRY_JOBS
from schemas.tables.ledger import COLUMNS
from trunkline_agent.errors import NotFound, TrunklineError, UsageError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.ids import JOB
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED

LINE_COLUMNS: Final = (
    "logged_at",
    "stream_kind",
    "stream_id",
    "seq",
    "type",
    "verdict",
    "reason",
    "why",
    "late",
    "masked",
    "value",
)
# Only a refold and a replay read the other columns.
JSON_COLUMNS: Final = tuple(name for name in COLUMNS if name not in ("value_sealed", "entries"))
_TIME_WIDTH, _STREAM_WIDTH, _SEQ_WIDTH, _EVENT_WIDTH, _VERDICT_WIDTH = 24, 16, 4, 19, 9
LINE_HEADING: Final = (
    f"{'TIME (UTC)':<{_TIME_WIDTH}}  {'STREAM':<{_STREAM_WIDTH}}  {'SEQ':>{_SEQ_WIDTH}}  "
    f"{'EVENT':<{_EVENT_WIDTH}}  {'VERDICT':<{_VERDICT_WIDTH}}  DETAIL OR REASON"
)
_COLOURS: Final = {ACCEPTED: "\033[32m", DUPLICATE: "\033[33m", REJECTED: "\033[31m"}
_TEXT_LIMIT: Final = 120


def text_line(row: dict[str, Any], *, coloured: bool = False) -> str:
    """Return a ledger row as one line of aligned text: time, stream, seq, event, verdict, and detail or reason.

    Control characters in texts of agents are escaped, and long texts are cut. LINE_HEADING is the heading.

    Args:
        row: The row, with the columns LINE_COLUMNS.
        coloured: Colour the verdict with ANSI sequences.
    """
    event, detail = _event_and_detail(row)
    verdict = f"{row['verdict']:<{_VERDICT_WIDTH}}"
    if coloured:
        verdict = f"{_COLOURS.get(row['verdict'], '')}{verdict}\033[0m"
    stream = escaped(f"{row['stream_kind']}/{row['stream_id']}")
    seq = "" if row["seq"] is None else str(row["seq"])
    text = detail if row["reason"] is None else f"{row['reason']}: {row['why']}"
    marks = ["late"] if row["late"] else []
    if row["masked"]:
        marks.append(f"masked {row['masked']}")
    detail = "  ".join([escaped(text)[:_TEXT_LIMIT], *(f"[{escaped(mark)}]" for mark in marks)])
    moment = iso_time(row["logged_at"], "milliseconds")
    line = (
        f"{moment:<{_TIME_WIDTH}}  {stream:<{_STREAM_WIDTH}}  {seq:>{_SEQ_WIDTH}}  "
        f"{escaped(event)[:_EVENT_WIDTH]:<{_EVENT_WIDTH}}  {verdict}  {detail}"
    )
    return line.rstrip()


def json_line(row: dict[str, Any]) -> str:
    """Return a ledger row as one JSON object in ASCII, without a line break.

    `row` has any columns of the ledger. Times become ISO 8601 with Z. Bytes such as `value` become a text. If
    they are not UTF-8, they become base64 under another name, such as `value_base64`. The JSON text in
    `changes` becomes an array.
    """
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, datetime):
            found[name] = iso_time(value, "microseconds")
        elif isinstance(value, bytes):
            try:
                found[name] = value.decode("utf-8")
            except UnicodeDecodeError:
                found[f"{name}_base64"] = base64.b64encode(value).decode("ascii")
        elif name == "changes" and value is not None:
            found[name] = json.loads(value)
        else:
            found[name] = value
    # ASCII only, so that no terminal obeys bidirectional marks or control characters.
    return json.dumps(found, separators=(",", ":"))


def iso_time(moment: datetime, precision: str) -> str:
    """Return `moment`, which must have a time zone, in UTC as ISO 8601 with Z.

    `precision` is the smallest unit, by the names of `datetime.isoformat`: `milliseconds` or `microseconds`.
    """
    return moment.astimezone(UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def body_of(value: bytes | None) -> dict[str, Any]:
    """Return the JSON object in a ledger row's `value`.

    The result is an empty dictionary if `value` is None, is not valid JSON, or is JSON of another type.
    """
    try:
        found, _ = decode(value or b"")
    except MalformedJsonError:
        return {}
    return found if isinstance(found, dict) else {}


def _event_and_detail(row: dict[str, Any]) -> tuple[str, str]:
    kind = row["type"] or "-"
    body = body_of(row["value"]) if kind == JOB_EVENT else {}
    event, detail = body.get("event"), body.get("detail")
    return event if isinstance(event, str) else kind, detail if isinstance(detail, str) else ""


META: Final = "meta.json"
STATUS: Final = "status.json"
EVENTS: Final = "events.ndjson"
_SEALED: Final = frozenset({"sealed_secret", "sealed_password"})
_MOMENTS: Final = ("registered_at", "picked_at", "started_at", "ended_at")


class Export(NamedTuple):
    """The result of an export: the written folder, the job's state by the ledger, and the number of records.

    The state is None if no accepted record has set one.
    """

    folder: Path
    status: str | None
    events: int


def export_job(settings: Settings, job_id: str, to: Path) -> Export:
    """Write a job's history into the new folder `to`: its ledger rows, its state and its registration.

    The files are meta.json (registration), status.json (state) and events.ndjson (rows, without sealed
    secrets). The result has the folder, the state and the number of rows. The folder appears complete or not at
    all.

    Raises:
        NotFound: The ledger has no record of the job.
        UsageError: `to` exists.
        TrunklineError: The folder cannot be written, or the ledger cannot be read.
    """
    if to.exists() or to.is_symlink():
        raise UsageError(f"--to: {to} is there already; it is not overwritten")
    where = LedgerFilter(stream_kind=JOB, stream_id=job_id)
    part = LedgerReader(settings).rows(where, JSON_COLUMNS)
    rows = part.rows.to_pylist()
    if not rows:
        raise NotFound(
            f"the ledger has no record of job {job_id} (yet: 'trunkline fold status' says how far it is)"
        )
    status = _status(job_id, rows)
    documents = {
        META: json.dumps(_meta(job_id, rows) | {"ledger_version": part.version}, indent=2) + "\n",
        STATUS: json.dumps(status, indent=2) + "\n",
        EVENTS: "".join(json_line(_without_sealed(row)) + "\n" for row in rows),
    }
    _write(to, documents)
    return Export(to, status["status"], len(rows))


def ledger_status(settings: Settings, job_id: str) -> str | None:
    """Return a job's newest state in the ledger, such as `completed`.

    None means that there is no ledger yet, or no accepted record of the job in it.
    """
    reader = LedgerReader(settings)
    if not reader.exists():
        return None
    columns = ("verdict", "status_after")
    rows = reader.rows(LedgerFilter(stream_kind=JOB, stream_id=job_id, verdict=ACCEPTED), columns).rows
    found = rows.column("status_after").to_pylist()
    return None if not found else found[-1]


def _meta(job_id: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the contents of the job's registration, and who registered it."""
    for row in rows:
        if row["type"] == JOB_REGISTERED and row["verdict"] == ACCEPTED:
            body = body_of(_without_sealed(row)["value"])
            return {
                "job_id": job_id,
                **{name: body.get(name) for name in ("description", "session", "broker")},
                "registered_by": f"{row['door']}/{row['principal']}",
                "registered_at": iso_time(row["logged_at"], "microseconds"),
                "topic": row["topic"],
            }
    return {"job_id": job_id}


def _status(job_id: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the job's row after the last change, and the number of records by verdict."""
    verdicts = Counter(row["verdict"] for row in rows)
    found: dict[str, Any] = {"job_id": job_id, "status": None}
    for row in rows:
        for change in json.loads(row["changes"] or "[]"):
            if change["view"] == REGISTRY_JOBS and change["key"] == job_id and change["row"] is not None:
                found = change["row"]
    for name in _MOMENTS:
        if isinstance(found.get(name), int):
            moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=found[name])
            found[name] = iso_time(moment, "microseconds")
    newest = max(rows, key=lambda row: row["offset"])
    return found | {"verdicts": verdicts, "last_position": [newest["partition"], newest["offset"]]}


def _without_sealed(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without the sealed texts of a registration."""
    if row["type"] != JOB_REGISTERED or row["value"] is None:
        return row
    body = body_of(row["value"])
    if isinstance(body.get("broker"), dict):
        body["broker"] = {name: value for name, value in body["broker"].items() if name not in _SEALED}
    return {**row, "value": canonical({name: value for name, value in body.items() if name not in _SEALED})}


def _write(to: Path, documents: dict[str, str]) -> None:
    draft = to.with_name(f".{to.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir(mode=0o700)
        for name, text in documents.items():
            with (draft / name).open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        # This fails if the target is a file or a folder that is not empty.
        draft.rename(to)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise TrunklineError(f"cannot write the export to {to}: {error.strerror}") from error
