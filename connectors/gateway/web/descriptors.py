"""Enough file descriptors for all connections that the budgets allow, and a reserve for everything else.

Kafka's clients, the ledger's and the views' files and the agents' pipes must find descriptors however many
strangers come. So the budgets end before the process's limit does.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Final

import structlog

from connectors.gateway.web.connection_budget import BudgetLimits
from schemas.errors import TrunklineError

log = structlog.stdlib.get_logger(__name__)

# For Kafka, tables, agents and logs.
RESERVE: Final = 256
# How many connections one listener accepts at most in one turn of the event loop.
_ACCEPTED: Final = 16
# A connection beyond the budget is accepted in one turn, cut in the next, and closed in the one after that.
_TURNS: Final = 3
_LEAST: Final = 8


def reserved(listeners: int) -> int:
    """How many descriptors are not for connections of the budgets."""
    return RESERVE + listeners * _ACCEPTED * _TURNS


def accepted_at_once(limits: BudgetLimits, listeners: int) -> int:
    """How many connections one listener may accept in one turn of the event loop.

    All listeners together take a quarter of the budget in one turn: a client that sends its request with its
    connection is read before so many others have come that it is the oldest.
    """
    return max(1, min(_ACCEPTED, limits.anonymous // (4 * listeners)))


def fitted(limits: BudgetLimits, listeners: int, descriptors: int) -> BudgetLimits:
    """The limits, scaled down where a process may have only so many descriptors. Raises TrunklineError when
    not even a few connections fit.
    """
    wanted, room = limits.anonymous + limits.authenticated, descriptors - reserved(listeners)
    if wanted <= room:
        return limits
    anonymous = limits.anonymous * room // wanted
    if anonymous < _LEAST or room - anonymous < _LEAST:
        raise TrunklineError(
            f"this process may open {descriptors} files, and {reserved(listeners)} are reserved for other use: "
            f"raise its limit (ulimit -Hn) to {reserved(listeners) + wanted} or more"
        )
    return replace(limits, anonymous=anonymous, authenticated=room - anonymous)


def fit_to_descriptors(limits: BudgetLimits, listeners: int, more: int = 0) -> BudgetLimits:
    """Raise this process's own limit of descriptors as far as the budgets need it, and scale the budgets down,
    with a line in the log, where the hard limit is too low. `more`: connections that have other budgets.

    Raises TrunklineError as `fitted` does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.anonymous + limits.authenticated + more + reserved(listeners)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = limits if soft == resource.RLIM_INFINITY else fitted(limits, listeners, soft - more)
    if found != limits:
        log.warning(
            "connection_budgets_reduced",
            open_files_limit=soft,
            needed=wanted,
            anonymous_connections=found.anonymous,
            connections=found.authenticated,
        )
    return found
