"""The gateway's HTTP servers: uvicorn, with a budget of connections and TLS.

The budgets are smaller than the limit of the process. So Kafka clients, table files and the pipes of agents get
file descriptors however many clients connect.
"""

from __future__ import annotations

import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import structlog
import uvicorn

from connectors.hub.engine.direct_http import DirectHttp
from connectors.hub.serving.bounded_http import BoundedHttp, TlsEntry
from connectors.hub.serving.connection_budget import BudgetLimits, ConnectionBudget
from connectors.plumbing.machine.json_log import LogLimit
from connectors.plumbing.network.sockets import probe_silent_peers
from connectors.programs.gateway_program.application import Door
from schemas.settings.settings import GatewaySettings
from trunkline_agent.errors import TrunklineError

log = structlog.stdlib.get_logger(__name__)

_FINISH_S: Final = 5
# The connections that the kernel keeps for a listener until they are accepted.
_BACKLOG: Final = 1024
# Only the gateway's own user can open the Unix socket, and needs few connections.
_LOCAL: Final = 32


class HttpServer(uvicorn.Server):
    """A uvicorn server for one door, which handles no signals.

    Args:
        door: The application and its address.
        tls: The TLS context. None means plain HTTP.
        budgets: The connection budgets of this gateway.
        idle_timeout_s: Seconds after which a connection is closed if no further request comes.
    """

    def __init__(self, door: Door, tls: ssl.SSLContext | None, budgets: Budgets, idle_timeout_s: int) -> None:
        self._budget = budgets.of(door)
        self._door = door
        self._tls = tls
        super().__init__(
            uvicorn.Config(
                door.app,
                loop="asyncio",
                http=cast(Any, self._protocol),  # uvicorn calls it like a class
                ws="none",
                lifespan=door.lifespan,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # the address of the client is not used
                timeout_keep_alive=idle_timeout_s,
                timeout_graceful_shutdown=_FINISH_S,
                backlog=budgets.accepted_at_once,
            )
        )

    def _protocol(self, **options: Any) -> BoundedHttp | TlsEntry:
        """Return the protocol of a new connection."""
        engine = self._door.engine
        kind = BoundedHttp if engine is None else partial(DirectHttp, engine=engine)
        http = partial(kind, budget=self._budget, listener=self._door.name, **options)
        if self._tls is None:
            return http()
        return TlsEntry(self._budget, self._door.name, self._tls, http)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen on these sockets, each with a queue of 1,024 connections in the kernel.

        uvicorn's `serve` calls this method. uvicorn alone would set the queue to the number of connections that
        it accepts in one turn of the event loop.
        """
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers as they are while the server runs. uvicorn's `serve` enters this context.

        `GatewayProgram` handles the signals for all servers of the process. Otherwise each server would replace
        the handlers of the others.
        """
        yield


class Budgets:
    """The connection budgets of one gateway: one for all TCP sockets, one for the Unix socket.

    Args:
        settings: The numbers and time limits of connections.
        listeners: The number of listening sockets.
        clock: Returns seconds and never goes back.

    Raises:
        TrunklineError: This process may not open enough file descriptors.
    """

    def __init__(self, settings: GatewaySettings, listeners: int, clock: Callable[[], float]) -> None:
        wanted = BudgetLimits(
            settings.anonymous_connections,
            settings.connections,
            settings.head_timeout_s,
            settings.body_timeout_s,
        )
        local = BudgetLimits(_LOCAL, _LOCAL, wanted.head_s, wanted.body_s)
        limits = fit_to_descriptors(wanted, listeners, local.anonymous + local.authenticated)
        self.accepted_at_once = accepted_at_once(limits, listeners)
        self._log_limit: LogLimit[tuple[str, str]] = LogLimit()
        self.tcp = ConnectionBudget(limits, clock, self._log_cut)
        self.local = ConnectionBudget(local, clock, self._log_cut)
        self.all = (self.tcp, self.local)

    def of(self, door: Door) -> ConnectionBudget:
        """Return the connection budget of a door: one for doors with a port, one for the Unix socket."""
        return self.tcp if door.socket_path is None else self.local

    def sweep(self) -> None:
        """Close the connections that have exceeded a time limit, such as that for sending a request's head.

        Call it every `SWEEP_S` seconds in the servers' event loop. It also logs how many log lines about closed
        connections the rate limit has left out.
        """
        for budget in self.all:
            budget.sweep()
        for kind, omitted in self._log_limit.due():
            listener, reason = kind or ("other", "other")
            log.info("connection_cuts_omitted", listener=listener, reason=reason, omitted=omitted)

    def _log_cut(self, listener: str, reason: str) -> None:
        omitted = self._log_limit.omitted((listener, reason))
        if omitted is not None:
            log.info("connection_cut", listener=listener, reason=reason, omitted=omitted)


def bound_socket(door: Door) -> socket.socket:
    """Return a new TCP socket that is bound to the door's host and port, but does not listen yet.

    Clients are refused until the server listens on it. The caller closes the socket. Raises TrunklineError if
    the address is in use, or is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in door.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only for an explicit protocol. Without it each answer waits 40 ms for the
    # client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe_silent_peers(listener)
    if door.send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, door.send_buffer_bytes)
    try:
        listener.bind((door.host, door.port))
    except OSError as error:
        listener.close()
        where = f"{door.host}:{door.port}"
        raise TrunklineError(
            f"cannot listen on {where}: {error.strerror}; choose another {door.setting}"
        ) from None
    return listener


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
