"""A hook of schemathesis: before each request to the hub, shorten its wait."""

from __future__ import annotations

from typing import Any

import schemathesis

WAITS = ("wait", "wait_reply")
SHORT_S, LONGEST_S = 0.1, 300.0


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Shorten a valid wait; one that the hub refuses stays as it is."""
    for name in WAITS:
        try:
            is_long = SHORT_S < float(case.query[name]) <= LONGEST_S
        except (KeyError, TypeError, ValueError):
            continue
        if is_long:
            case.query[name] = SHORT_S
