"""The gateway program: HTTP hub, live view and reactor in one process.

**Delivers** each change that a request asks for as one record, and answers with its verdict.
**Acknowledges when** Kafka has the record and the live view has settled it.
**Loses when** never silently: a request that ended in an error may or may not have had its effect; sent
again with the same Idempotency-Key it has it once.

Any number of gateways may run on one log, each on a port of its own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

import structlog
import uvicorn

from connectors.gateway.application import build_application
from connectors.gateway.hub import Companion, Hub
from connectors.gateway.operator_token import ensure_operator_token
from connectors.json_log import configure_json_log
from connectors.live_view import LiveView
from connectors.mqtt_accounts import MqttAccounts
from connectors.reactor import Reactor
from connectors.session_keeper import SessionKeeper
from schemas.errors import TrunklineError
from schemas.sealing import Keyring, load_keyring
from schemas.settings import Settings, SettingsError, load_settings
from schemas.view_rows import REGISTRY_SESSIONS

log = structlog.stdlib.get_logger(__name__)

_THREADS: Final = 32
_WATCH_S: Final = 0.5
_FINISH_S: Final = 5
# Longer than clients keep an idle connection, so that they close it and never meet a closed one.
_KEEP_ALIVE_S: Final = 75
# A request makes some hundred objects and next to no cycles: the collector's defaults look at them with each.
_GC_THRESHOLDS: Final = (20_000, 20, 20)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def companions_of(settings: Settings, keyring: Keyring, live_view: LiveView) -> list[Companion]:
    """What lives with the gateway under these settings."""
    found: list[Companion] = [SessionKeeper(settings, lambda: live_view.rows(REGISTRY_SESSIONS))]
    if settings.mqtt.accounts_dir is not None:
        found.append(MqttAccounts(settings, keyring, live_view))
    return found


class GatewayProgram:
    """Runs until SIGTERM or SIGINT."""

    def __init__(self, settings: Settings, keyring: Keyring, ready_file: Path | None = None) -> None:
        self._settings = settings
        self._ready_file = ready_file
        operator_token = ensure_operator_token(settings)
        secrets = [operator_token]
        if settings.master_key is not None:
            secrets.append(settings.master_key.get_secret_value())
        if settings.mqtt.password is not None:
            secrets.append(settings.mqtt.password.get_secret_value())
        configure_json_log("gateway", secrets)
        self._live_view = LiveView(settings, keyring)
        self._hub = Hub(
            settings,
            keyring,
            operator_token,
            self._live_view,
            companions_of(settings, keyring, self._live_view),
        )
        self._reactor = Reactor(settings, self._live_view)

    def run(self) -> None:
        """Serve until stopped. Raises TrunklineError when it cannot start, or when the live view fails."""
        started = False
        with bound_socket(self._settings) as listener:
            try:
                self._hub.open()
                self._reactor.start()
                started = True
                asyncio.run(self._serve(listener))
            except OSError as error:
                raise TrunklineError(f"cannot serve: {error.strerror}") from error
            finally:
                if started:
                    self._reactor.stop()
                self._hub.close()
        if self._live_view.failure is not None:
            raise TrunklineError(f"the live view has stopped: {self._live_view.failure}")

    async def _serve(self, listener: socket.socket) -> None:
        gc.set_threshold(*_GC_THRESHOLDS)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="gateway"))
        server = _Server(build_application(self._hub), self._hub.stopping.set)
        for number in _SIGNALS:
            # As uvicorn does; from here on, so that none is lost in between and none is raised at the end.
            signal.signal(number, server.handle_exit)
        watch = asyncio.create_task(self._watch(server))
        try:
            await server.serve(sockets=[listener])
        finally:
            watch.cancel()

    async def _watch(self, server: _Server) -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        port = self._settings.gateway.port
        log.info("serving", host=self._settings.gateway.host, port=port)
        if self._ready_file is not None:
            self._ready_file.touch()
        while self._live_view.failure is None:
            await asyncio.sleep(_WATCH_S)
        log.error("live_view_failed", error=type(self._live_view.failure).__name__)
        self._hub.stopping.set()
        server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn, which tells the long answers to end when a signal comes."""

    def __init__(self, app: object, stopping: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody looks at the client's address
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_FINISH_S,
            )
        )
        self._loop = asyncio.get_running_loop()
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; runs in the main thread, between two of its instructions."""
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stopping)
        super().handle_exit(sig, frame)


def bound_socket(settings: Settings) -> socket.socket:
    """The gateway's address, taken, but not listened on yet: who comes before all is ready is refused."""
    gateway = settings.gateway
    family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
    # The protocol is said aloud: asyncio sets TCP_NODELAY only where it sees it, and without that each answer
    # waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((gateway.host, gateway.port))
    except OSError as error:
        listener.close()
        where = f"{gateway.host}:{gateway.port}"
        raise TrunklineError(
            f"cannot listen on {where}: {error.strerror}; choose another gateway.port"
        ) from None
    return listener


def main() -> int:
    """Run the gateway until SIGTERM or SIGINT. Returns the exit code."""
    for number in _SIGNALS:
        signal.signal(number, _end_the_start)
    ready = os.environ.get("TRUNKLINE_READY_FILE")
    try:
        settings = load_settings()
        program = GatewayProgram(settings, load_keyring(settings), Path(ready) if ready else None)
    except SettingsError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    try:
        program.run()
    except (TrunklineError, SettingsError) as error:
        log.error("refused_to_start", error=str(error))
        return error.exit_code if isinstance(error, TrunklineError) else 2
    except _Stopped:
        log.info("stopped_while_starting")
        return 0
    log.info("stopped")
    return 0


class _Stopped(BaseException):
    pass


def _end_the_start(number: int, frame: FrameType | None) -> None:
    raise _Stopped
