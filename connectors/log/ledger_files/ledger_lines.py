"""Formats rows of the ledger as lines: aligned text for people, JSON for programs."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any, Final

from schemas.streams.job.job_registry import JOB_EVENT
from schemas.tables.ledger import COLUMNS
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
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
