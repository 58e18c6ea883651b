"""The check of `trunkline doctor` on the file bridge, and on lines of the file queue that wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from connectors.cli.doctor.findings import FAIL, Checks, Finding, warn
from connectors.cli.doctor.parts import check_part
from connectors.programs.local_stack.part_plan import FILES
from schemas.settings.settings import Settings
from trunkline_agent.terminal_text import escaped

CHECKS: Final = Checks()
# The doctor names so many sessions or mailboxes for which lines of the file queue wait.
_SHOWN: Final = 5


@CHECKS.add(FILES)
def check_files(settings: Settings) -> Finding:
    """Check that the file bridge is ready, and that no session and no mailbox keeps lines of the queue waiting.

    Waiting lines are a warning.
    """
    from connectors.doors.file_bridge.progress import Progress, progress_file

    part = check_part(settings, FILES)
    progress = Progress.load(progress_file(settings))
    held = [f"{name}/{one} ({why})" for name, names in progress.held.items() for one, why in names.items()]
    if part.level == FAIL or not (held or progress.stuck):
        return part
    if progress.stuck:
        said = _some(f"{name} ({why})" for name, why in progress.stuck.items())
        mend = f"trunkline logs {FILES} says since when; the bridge tries again, so mend the cause"
        return warn(f"{part.found}; no line of these sessions of the file queue is carried: {said}", mend)
    return warn(
        f"{part.found}; lines of the file queue wait for {_some(held)}",
        "let the readers take their messages, or raise their limits: trunkline principals limit",
    )


def _some(texts: Iterable[str]) -> str:
    """Return the first texts, and how many more there are."""
    found = sorted(texts)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(escaped, found[:_SHOWN])) + more
