"""The lock of a session, whose holder first finishes the work of an expire that was killed."""

from __future__ import annotations

from trunkline_agent.queue.session_files import PLAN, SessionFolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def no_step(name: str) -> None:
    """Do nothing. Tests replace this hook, which each step of an operation calls, to kill the process there."""


def lock_session(folder: SessionFolder, step: Callable[[str], None] = no_step) -> int | None:
    """Wait for the session's lock and take it. Then finish or undo the work of an `expire` that was killed.

    Returns the number of messages that the killed `expire` has removed, or None if nothing was to finish.
    """
    folder.lock()
    if not folder.has(PLAN):
        return None
    from trunkline_agent.queue.expiry import finish_expire

    return finish_expire(folder, step)
