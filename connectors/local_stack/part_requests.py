"""Requests for more parts, from `trunkline up` to the supervisor of a running stack: a file each, in
`data_dir/run/`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.settings.settings import Settings

_PATTERN = "add-*.json"


def _folder(settings: Settings) -> Path:
    return settings.data_path / "run"


@contextmanager
def requested(settings: Settings, names: Iterable[str]) -> Iterator[None]:
    """Ask for these parts; the request is withdrawn at the end of the block if nobody has read it."""
    file = _folder(settings) / f"add-{secrets.token_hex(8)}.json"
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(sorted(names)), encoding="utf-8")
    draft.replace(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def take_requests(settings: Settings) -> set[str]:
    """Return the parts that are asked for, and remove the requests. What is no request is removed, too."""
    found: set[str] = set()
    for file in _folder(settings).glob(_PATTERN):
        try:
            names = json.loads(file.read_text(encoding="utf-8"))
            file.unlink(missing_ok=True)
        except OSError:
            continue
        except ValueError:
            file.unlink(missing_ok=True)
            continue
        if isinstance(names, list):
            found |= {name for name in names if isinstance(name, str)}
    return found
