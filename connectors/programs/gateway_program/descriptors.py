"""File descriptors for all connections that the connection budgets allow, and a reserve for everything else.

Kafka clients, table files and the pipes of agents must get descriptors however many clients connect. Therefore
the budgets are smaller than the limit of the process.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Final

import structlog

from connectors.hub.serving.connection_budget import BudgetLimits
from trunkline_agent.errors import TrunklineError

log = structlog.stdlib.get_logger(__name__)

# For Kafka, tables, agents and logs.
RESERVE: Final = 256
# The most connections that one listener accepts in one turn of the event loop.
_ACCEPTED: Final = 16
# A connection beyond the budget is accepted in one turn, cut in the next, and closed in the one after that.
_TURNS: Final = 3
_LEAST: Final = 8


def reserved(listeners: int) -> int:
    """Return how many file descriptors of the process are kept for other use than connections in a budget.

    `listeners` is the number of listening sockets. Each accepts some connections before the budget can refuse
    them.
    """
    return RESERVE + listeners * _ACCEPTED * _TURNS


def accepted_at_once(limits: BudgetLimits, listeners: int) -> int:
    """Return how many connections one listening socket may accept in one turn of the event loop.

    All `listeners` sockets together accept at most a quarter of the anonymous connections of `limits` in one
    turn. More would fill the budget, which would close connections before their first request is read.
    """
    return max(1, min(_ACCEPTED, limits.anonymous // (4 * listeners)))


def fitted(limits: BudgetLimits, listeners: int, descriptors: int) -> BudgetLimits:
    """Return connection limits that fit into `descriptors` file descriptors.

    If the wanted limits fit, they are returned unchanged. Otherwise the numbers of anonymous and authenticated
    connections are reduced in proportion.

    Args:
        limits: The wanted limits.
        listeners: The number of listening sockets.
        descriptors: The number of file descriptors that the process may open.

    Raises:
        TrunklineError: Not even a few connections fit.
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
    """Raise the process's limit of file descriptors as far as needed, and return connection limits that fit.

    If the process's hard limit is too low, smaller connection limits are returned and a warning is logged.

    Args:
        limits: The wanted connection limits.
        listeners: The number of listening sockets.
        more: The number of connections that other budgets allow in this process.

    Raises:
        TrunklineError: Not even a few connections fit.
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
