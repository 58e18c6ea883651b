"""The gateway's HTTP servers: uvicorn, with a budget of connections and TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import structlog
import uvicorn

from connectors.hub.engine.direct_http import DirectHttp
from connectors.hub.serving.bounded_http import BoundedHttp, TlsEntry
from connectors.hub.serving.connection_budget import BudgetLimits, ConnectionBudget
from connectors.plumbing.network.peer_probe import probe_silent_peers
from connectors.plumbing.terminal.log_limit import LogLimit
from connectors.programs.gateway_program.descriptors import accepted_at_once, fit_to_descriptors
from connectors.programs.gateway_program.doors import Door
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
