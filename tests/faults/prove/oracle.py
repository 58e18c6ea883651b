"""The backbone's promises, noted by the clients: each acknowledged id with a hash of its content.

It knows nothing of the system: no fold, no table, no log. One JSON line a note, written before the sender goes
on, so that a run that is cut off has its notes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ACKED, HANDED, ENDED, FORGED, ASKED = "acked", "handed", "ended", "forged", "asked"
FOREIGN: Final = "foreign"


def content_hash(*parts: object) -> str:
    """The hash of what was said: of a message sender, recipient and body; of an event its kind and detail; of a
    job and a task its description.
    """
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()


@dataclass(frozen=True)
class Note:
    """One thing that was heard.

    `acked`: `id` in `stream` was acknowledged to `sender` at `door`, with content of this hash; `order` is its
    place among what this sender said to this stream, None where the sender itself mixed it up. `handed`: a
    message was handed out by the request `request`; over MQTT it may come twice, so all of that is one request.
    `ended`: a stream's end was acknowledged, as `status`. `forged`: nobody who may said this; it must not be
    accepted. `asked`: `id` must have exactly one answer, a message of `kind` to `recipient` whose body holds
    `body`. `foreign`: a record with this CloudEvents id was put into the log by somebody who is no door.
    """

    what: str
    door: str
    stream: str
    id: str
    sender: str = ""
    hash: str = ""
    order: int | None = None
    request: str = ""
    status: str = ""
    recipient: str = ""
    kind: str = ""
    body: str = ""


class Oracle:
    """Notes of one run. Safe for several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._orders: dict[tuple[str, str], int] = {}
        self._notes: list[Note] = []

    def note(self, note: Note) -> None:
        """Remember it."""
        with self._lock:
            self._notes.append(note)
            with self._path.open("a") as file:
                file.write(json.dumps(_short(note)) + "\n")

    def acked(self, door: str, stream: str, id_: str, sender: str, hash_: str, *, ordered: bool = True) -> None:
        """It was acknowledged. `ordered`: the sender waited for this before it said anything more."""
        order = None
        if ordered:
            with self._lock:
                order = self._orders.get((sender, stream), 0)
                self._orders[sender, stream] = order + 1
        self.note(Note(ACKED, door, stream, id_, sender, hash_, order))

    def notes(self, what: str | None = None) -> list[Note]:
        """All of a kind so far."""
        with self._lock:
            return [note for note in self._notes if what in (None, note.what)]

    @property
    def acknowledged(self) -> int:
        """How many ids were acknowledged."""
        return len({(note.stream, note.id) for note in self.notes(ACKED)})


def _short(note: Note) -> dict[str, Any]:
    return {name: value for name, value in asdict(note).items() if value not in ("", None)}


def read_notes(path: Path) -> list[Note]:
    """The notes of a run that has ended."""
    return [Note(**json.loads(line)) for line in path.read_text().splitlines()]


TERMINAL: Final = frozenset(
    {"completed", "error", "failed", "cancelled", "claimed", "read", "dead", "expired", "cleared"}
)
"""States that are the last ones, by the specification."""
