"""The demo's report on standard output: jobs, dead letters by reason, one timeline, numbers."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from connectors.log.ledger_files.ledger_export import LINE_HEADING, text_line
from connectors.tools.demo.outcome import Row, job_states, stream_of
from connectors.tools.demo.performance import Performance
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import JOB_EVENT
from schemas.tables.ledger import LEDGER
from trunkline_agent.terminal_text import escaped, is_coloured
from trunkline_agent.wire.ids import JOB
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, REASONS, REJECTED

_PLAIN_WIDTH: Final = 120
_SHOWN_LIMIT: Final = 44
_NUMBERS: Final = ("acc.", "dup.", "rej.", "rows", "told")
_STATE_COLOURS: Final = {
    "completed": "green",
    "error": "red",
    "cancelled": "magenta",
    "running": "cyan",
    "pending": "yellow",
}


def show(performance: Performance, settings: Settings) -> None:
    """Print the report of a run on standard output: jobs, dead letters, one job's timeline, numbers."""
    console = Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else _PLAIN_WIDTH,
        highlight=False,
        markup=False,
        no_color=not is_coloured(),
    )
    console.print(_jobs(performance))
    console.print(_dead_letters(performance))
    _timeline(console, performance)
    console.print()
    console.print(f"The ledger is the Delta table {settings.table_path(LEDGER)}", soft_wrap=True)
    outcome = performance.outcome
    console.print(
        f"{outcome.sent} job events reached Kafka = {outcome.accepted} accepted + "
        f"{outcome.duplicate} duplicate + {sum(outcome.rejected.values())} rejected"
    )
    receipts = performance.receipts
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in receipts.verdicts.items())
    durable = f", {receipts.durable} only that the event is durable" if receipts.durable else ""
    console.print(f"Receipts told the senders: {verdicts}{durable}", soft_wrap=True)
    for line in performance.lines:
        console.print(line, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left")
    return table


def _jobs(performance: Performance) -> Table:
    table = _table("What became of each job", "job", "state", "acc.", "dup.", "rej.", "its part")
    counts = Counter((row["stream_id"], row["verdict"]) for row in _events(performance))
    states = job_states(performance.rows)
    for script in performance.plan.scripts:
        if script.actor is None:
            continue
        job_id = script.actor.job_id
        state = states.get(job_id, "unknown")
        numbers = [str(counts[(job_id, verdict)]) for verdict in (ACCEPTED, DUPLICATE, REJECTED)]
        shown = Text(state, style=_STATE_COLOURS.get(state, ""))
        table.add_row(job_id, shown, *numbers, script.title)
    return table


def _dead_letters(performance: Performance) -> Table:
    table = _table(
        "Dead letters by reason, an example each", "reason", "rows", "told", "an example", "what it said"
    )
    labels = {delivery.ce_id: delivery.step.label for delivery in performance.deliveries}
    rejected = [row for row in _events(performance) if row["verdict"] == REJECTED]
    for reason in REASONS:
        rows = [row for row in rejected if row["reason"] == reason]
        if rows:
            # A row with a body is the better example.
            row = max(rows, key=lambda candidate: bool(candidate["value"]))
            label = labels.get(row["ce_id"], row["why"] or "")
            told = str(performance.receipts.rejections.get(reason, 0))
            example = escaped(f"{label}, {stream_of(row)}")
            table.add_row(reason, str(len(rows)), told, example, _said(row["value"]))
    return table


def _said(value: bytes | None) -> str:
    """Return the content of a rejected event in at most 44 characters, escaped."""
    try:
        body = decode(value or b"")[0]
        text = f"{body['event']} {body['seq']}: {body['detail']}"
    except (MalformedJsonError, KeyError, TypeError):
        text = (value or b"")[:_SHOWN_LIMIT].decode("utf-8", "backslashreplace")
    text = escaped(text)
    return text if len(text) <= _SHOWN_LIMIT else text[: _SHOWN_LIMIT - 3] + "..."


def _timeline(console: Console, performance: Performance) -> None:
    rows: dict[str, list[Row]] = {}
    for script in performance.plan.scripts:
        if script.actor is not None:
            of_job = (JOB, script.actor.job_id)
            rows[script.title] = [r for r in performance.rows if (r["stream_kind"], r["stream_id"]) == of_job]
    # The job with the most different verdicts and reasons, and among these the shortest.
    title = max(rows, key=lambda name: _variety(rows[name]))
    console.print(Text(f"One job's timeline: {title}", style="bold"), soft_wrap=True)
    console.print(LINE_HEADING, soft_wrap=True)
    for row in rows[title]:
        console.print(Text.from_ansi(text_line(row, coloured=is_coloured())), soft_wrap=True)


def _variety(rows: list[Row]) -> tuple[int, int]:
    kinds = {(row["verdict"], row["reason"], row["late"]) for row in rows}
    return len(kinds), -len(rows)


def _events(performance: Performance) -> list[dict[str, Any]]:
    return [row for row in performance.rows if row["type"] == JOB_EVENT]
