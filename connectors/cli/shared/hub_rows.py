"""How the commands of the hub print what it lists, and check the names that become part of its addresses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from connectors.cli.shared.text_table import aligned, print_json
from schemas.errors import NotFound, UsageError
from schemas.wire.ids import is_name

Row = dict[str, Any]


def checked_name(text: str, what: str) -> str:
    """`text` itself. Raises UsageError for what is no name: it must not become another address."""
    if not is_name(text):
        raise UsageError(f"not the name of {what}: {text!r}")
    return text


def print_rows(
    args: argparse.Namespace,
    found: dict[str, Any],
    key: str,
    heading: Sequence[str],
    cells: Callable[[Row], Sequence[object]],
) -> int:
    """Print the rows that `found` holds under `key`, as a table or as JSON. Raises NotFound when a person is
    told and there is none; a program gets its empty list.
    """
    if args.json:
        print_json(found)
        return 0
    rows = found[key]
    if not rows:
        raise NotFound(f"there are no such {key}")
    print(aligned(heading, [cells(row) for row in rows]))
    if found.get("total", 0) > len(rows):
        print(f"{len(rows)} of {found['total']}; --limit shows more", file=sys.stderr)
    return 0
