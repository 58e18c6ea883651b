"""`trunkline tail --live`: settled records from the gateway, milliseconds after they came."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from connectors.gateway_client.event_stream import GAP, SETTLED, SNAPSHOT, EventStream
from connectors.gateway_client.gateway_client import path_of, reachable
from connectors.ledger_files.ledger_lines import LINE_HEADING, text_line
from connectors.terminal.terminal_text import escaped, is_coloured
from schemas.settings.settings import Settings

_LOOK_S = 1.0


@dataclass(frozen=True)
class LiveFilter:
    """Which records are wanted; None is any."""

    stream: str | None
    type: str | None
    verdict: str | None
    reason: str | None
    door: str | None

    def fits(self, data: dict[str, Any]) -> bool:
        """What the gateway does not filter itself."""
        door = (data["principal"] or "").partition("/")[0]
        return self.reason in (None, data["reason"]) and self.door in (None, door)


def follow_live(
    settings: Settings, wanted: LiveFilter, *, as_json: bool, check_reader: Callable[[], object]
) -> None:
    """Print records until told to end; `check_reader` raises when nobody reads. Raises TrunklineError."""
    parameters = {"stream": wanted.stream, "type": wanted.type, "verdict": wanted.verdict}
    with (
        reachable(settings) as gateway,
        EventStream(gateway, path_of("events"), parameters, lost=_tell_lost) as stream,
    ):
        heading = not as_json
        while True:
            event = stream.next(_LOOK_S)
            check_reader()
            if event is None:
                continue
            if event.name == SNAPSHOT and heading:
                print(LINE_HEADING, flush=True)
                heading = False
            elif event.name == GAP:
                _tell("records were missed; the ledger has them: trunkline tail")
            elif event.name == SETTLED and wanted.fits(event.data):
                line = json.dumps(event.data, separators=(",", ":")) if as_json else _line(event.data)
                print(line, flush=True)


def _line(data: dict[str, Any]) -> str:
    kind, _, name = data["stream"].partition("/")
    body = data["body"]
    row = {
        "logged_at": datetime.fromisoformat(data["logged_at"]),
        "stream_kind": kind,
        "stream_id": name,
        "masked": None,
        "value": None if body is None else json.dumps(body).encode("ascii"),
        **{field: data[field] for field in ("seq", "type", "verdict", "reason", "why", "late")},
    }
    return text_line(row, coloured=is_coloured())


def _tell(text: str) -> None:
    print(f"trunkline tail: {escaped(text)}", file=sys.stderr, flush=True)


def _tell_lost(why: str | None) -> None:
    _tell("gateway: connected again" if why is None else f"gateway: {why}; trying again")
