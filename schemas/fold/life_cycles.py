"""The words that the life cycles of several kinds of streams share, and the answer to a forbidden transition.

Each kind declares its own states and transitions in its package. The declaration is a table from a state to the
states that may follow it; a state that nothing may follow is terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from schemas.fold.settled import Outcome, rejected
from schemas.wire.verdicts import AFTER_TERMINAL, ILLEGAL_TRANSITION

PENDING: Final = "pending"
RUNNING: Final = "running"
COMPLETED: Final = "completed"
ERROR: Final = "error"
CANCELLED: Final = "cancelled"
STOPPED: Final = "stopped"

Transitions = Mapping[str, frozenset[str]]
"""A state and the states that may follow it."""


def terminal_states(transitions: Transitions) -> frozenset[str]:
    """Return the states that nothing may follow."""
    return frozenset(state for state, followers in transitions.items() if not followers)


def wrong_state(transitions: Transitions, status: str, what: str, why: str | None = None) -> Outcome:
    """Return the rejection of a record that the state `status` does not allow.

    Args:
        transitions: the kind's table, which tells whether `status` is terminal.
        status: the state of the stream before the record.
        what: the thing that is in that state, such as `job`.
        why: the explanation if the state is not terminal; by default it names the state.
    """
    if not transitions[status]:
        return rejected(AFTER_TERMINAL, f"the {what} is {status}", status)
    return rejected(ILLEGAL_TRANSITION, why or f"the {what} is {status}", status)
