"""Judges a second process of a part that was started by mistake: it must refuse, stand by or share the work."""

from __future__ import annotations

from typing import Final

from tests.faults.prove.schedule import STREAMS
from trunkline_agent.errors import BackboneUnreachable, Refused

_REFUSED: Final = Refused.exit_code
_UNREACHABLE: Final = BackboneUnreachable.exit_code
_REFUSE: Final = (STREAMS, "gateway_port")
_STAND_BY: Final = ("bridge", "files")


def judge_second(
    name: str,
    *,
    exit_code: int | None,
    is_ready: bool,
    stands_by: bool,
    is_alone: bool,
    was_troubled: bool,
    is_late: bool,
) -> tuple[str | None, bool]:
    """Return the forbidden action of a second process of a part, and whether it behaved as it should.

    `is_alone`: the first one may have gone, and this one works in its place. `was_troubled`: what it needs was
    away; then it may say so and end, or wait. `is_late`: it has had its time.
    """
    if name in _REFUSE:
        if exit_code == _UNREACHABLE and was_troubled:
            return None, False
        if exit_code is not None:
            is_wrong = exit_code == 0 or (name == STREAMS and exit_code != _REFUSED)
            return (f"ended with {exit_code}" if is_wrong else None), True
        if is_ready:
            return (None if is_alone else "works beside the first"), is_alone
        return ("neither refused nor ended" if is_late and not is_alone else None), False
    if exit_code is not None:
        is_wrong = exit_code != _UNREACHABLE and not was_troubled
        return (f"ended with {exit_code}" if is_wrong else None), False
    if name in _STAND_BY:
        if is_ready and not (stands_by or is_alone or was_troubled):
            return "works beside the first", False
        shows = stands_by or is_ready
    else:
        shows = is_ready
    return ("has not shown itself in its time" if is_late and not shows and not was_troubled else None), shows
