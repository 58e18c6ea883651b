"""The states that several kinds of streams share, and the rejection of a forbidden transition.

Each kind declares its own states and transitions in its package: a table from each state to the states that may
follow it. A state that no other state may follow is terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from schemas.fold.settled import Outcome, rejected
from trunkline_agent.wire.verdicts import AFTER_TERMINAL, ILLEGAL_TRANSITION

PENDING: Final = "pending"
RUNNING: Final = "running"
COMPLETED: Final = "completed"
ERROR: Final = "error"
CANCELLED: Final = "cancelled"
STOPPED: Final = "stopped"

Transitions = Mapping[str, frozenset[str]]
"""Each state with the states that may follow it."""


def terminal_states(transitions: Transitions) -> frozenset[str]:
    """Return the terminal states of `transitions`, which no other state may follow, such as `completed`."""
    return frozenset(state for state, followers in transitions.items() if not followers)


def wrong_state(transitions: Transitions, status: str, what: str, why: str | None = None) -> Outcome:
    """Return the outcome that rejects a record because its stream's state does not allow it.

    Args:
        transitions: the states of the stream's kind, each with the states that may follow it.
        status: the state of the stream before the record, one of the keys of `transitions`.
        what: the noun for the thing in that state, such as `job`. It appears in the explanation.
        why: the explanation for a state that is not terminal. `None` means `the <what> is <status>`.

    Returns:
        A rejection with the reason `after_terminal` if `status` is terminal, else `illegal_transition`.
    """
    if not transitions[status]:
        return rejected(AFTER_TERMINAL, f"the {what} is {status}", status)
    return rejected(ILLEGAL_TRANSITION, why or f"the {what} is {status}", status)
