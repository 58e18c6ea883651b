"""The gateway program: live view, reactor and the doors of doors.py in one process.

**Delivers** each requested change as one record, and answers with its verdict. **Acknowledges when** Kafka has
the record and the live view has settled it. **Loses when** never silently: a request that ended in an error may
or may not have taken effect. Repeated with the same Idempotency-Key, it takes effect once.

Any number of gateways may run on one log, each on its own ports.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import ssl
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

import structlog

from connectors.doors.mqtt_accounts.mosquitto_files import reload_broker
from connectors.doors.mqtt_accounts.mqtt_accounts import MqttAccounts
from connectors.doors.mqtt_accounts.retained_ends import RetainedEnds
from connectors.doors.out_of_band.signed_commands import ensure_operator_key
from connectors.hub.live.live_view import LiveView
from connectors.hub.reactor.reactor import Reactor
from connectors.hub.services.hub import Hub
from connectors.hub.serving.connection_budget import SWEEP_S, ConnectionFigures
from connectors.log.ledger_files.message_export_reader import MessageExporter
from connectors.operations.webhooks.webhook_calls import WebhookCalls
from connectors.plumbing.gateway_client.gateway_access import (
    check_listeners,
    ensure_operator_token,
    listener_context,
)
from connectors.plumbing.machine.background_service import BackgroundService
from connectors.plumbing.machine.json_log import configure_json_log
from connectors.plumbing.network.sockets import ClaimedSocket
from connectors.plumbing.tls_keys.served_certificates import CertificateMetrics, CertificateWatch, reload_chain
from connectors.programs.gateway_program.application import Door, doors_of
from connectors.programs.gateway_program.http_server import Budgets, HttpServer, bound_socket
from connectors.programs.processes.session_keeper import SessionKeeper
from schemas.keys.sealing import Keyring, load_keyring
from schemas.settings.settings import Settings, SettingsError, load_settings
from schemas.streams.session.sessions import SessionRow
from trunkline_agent.errors import TrunklineError

log = structlog.stdlib.get_logger(__name__)

_THREADS: Final = 32
_WATCH_S: Final = 0.5
# A request makes hundreds of objects and almost no cycles, so the default thresholds collect far too often.
_GC_THRESHOLDS: Final = (20_000, 20, 20)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def services_of(settings: Settings, keyring: Keyring, live_view: LiveView) -> list[BackgroundService]:
    """Return the background services that the settings enable, not started. The hub starts and stops them.

    The first service ends the processes of ended sessions. Optional ones keep the accounts of the local MQTT
    broker, and write an hourly export of all messages to a file.
    """

    def sessions(names: Collection[str]) -> list[SessionRow]:
        named = (live_view.get(SessionRow, name) for name in names)
        return [*live_view.live(SessionRow), *(row for row in named if row is not None)]

    found: list[BackgroundService] = [SessionKeeper(settings, sessions)]
    if settings.mqtt.accounts_dir is not None:
        found += [MqttAccounts(settings, keyring, live_view), RetainedEnds(settings, live_view)]
    if settings.agent_mcp.export_interval_ms:
        found.append(MessageExporter(settings))
    return found


def certificate_watches(settings: Settings, tls: ssl.SSLContext | None) -> Iterator[CertificateWatch]:
    """Yield the watches of the certificates that the gateway, and the local Mosquitto beside it, serve.

    A new certificate of the gateway is served at once. Mosquitto reads its files again after SIGHUP.
    """
    gateway, mqtt = settings.gateway, settings.mqtt
    if tls is not None and gateway.certfile is not None:
        files = [path for path in (gateway.certfile, gateway.keyfile) if path is not None]
        yield CertificateWatch(files, partial(reload_chain, tls, gateway.certfile, gateway.keyfile))
    if mqtt.tls and mqtt.accounts_dir is not None:
        names = ("mosquitto.crt", "mosquitto.key", "ca.crt")
        yield CertificateWatch(
            [settings.tls_path / name for name in names], partial(reload_broker, mqtt.accounts_dir)
        )


class GatewayProgram:
    """The gateway process, from its start to SIGTERM or SIGINT.

    The constructor checks the settings, sets up the program's log and creates all parts. `run` starts them.
    `ready_file` is the path of a file that is created when the gateway answers requests; None for no file.
    """

    def __init__(self, settings: Settings, keyring: Keyring, ready_file: Path | None = None) -> None:
        self._settings = settings
        self._ready_file = ready_file
        check_listeners(settings)
        operator_token = ensure_operator_token(settings)
        ensure_operator_key(settings)
        given = [secret for secret in (settings.master_key, settings.mqtt.password) if secret is not None]
        configure_json_log("gateway", [operator_token, *(secret.get_secret_value() for secret in given)])
        # Two gateways of a machine serve different ports, so each has a store of its own.
        folder = settings.state_path / f"gateway-{settings.gateway.port}"
        self._live_view = LiveView(settings, keyring, folder)
        services = services_of(settings, keyring, self._live_view)
        self._hub = Hub(settings, keyring, operator_token, self._live_view, services)
        self._reactor = Reactor(settings, self._live_view, own_answers=self._hub.own_answers)
        self._webhooks = WebhookCalls(self._hub)
        self._doors = doors_of(self._hub)
        self._tls = listener_context(settings.gateway)
        self._certificates = list(certificate_watches(settings, self._tls))
        self._hub.metrics.add(CertificateMetrics(settings))
        self._not_served: dict[str, str] = {}

    def run(self) -> None:
        """Open the hub, start the reactor and serve all doors. Block until SIGTERM or SIGINT, then close them.

        Call this method once, on the main thread. Raises TrunklineError if the gateway cannot start, or if the
        live view fails while the gateway runs.
        """
        started = False
        with ExitStack() as bound:
            listeners = [self._bound(door, bound) for door in self._doors]
            try:
                self._hub.open()
                for door in self._doors:
                    door.opened()
                self._reactor.start()
                started = True
                asyncio.run(self._serve(listeners))
            except OSError as error:
                # Another program can take a bound address until the gateway listens on it.
                where = ", ".join(f"{d.setting} {d.port}" for d in self._doors if d.socket_path is None)
                raise TrunklineError(f"cannot serve at {where}: {error.strerror}") from error
            finally:
                if started:
                    self._reactor.stop()
                self._hub.close()
        if self._live_view.failure is not None:
            raise TrunklineError(f"the live view has stopped: {self._live_view.failure}")

    def _bound(self, door: Door, bound: ExitStack) -> socket.socket | ClaimedSocket:
        """Bind the address of a door. A Unix socket may belong to another gateway until that one ends."""
        if door.socket_path is None:
            return bound.enter_context(bound_socket(door))
        claimed = ClaimedSocket(door.socket_path, self._settings.data_path)
        bound.callback(claimed.release)
        claimed.claim()
        return claimed

    async def _serve(self, listeners: Sequence[socket.socket | ClaimedSocket]) -> None:
        gc.set_threshold(*_GC_THRESHOLDS)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="gateway"))
        self._live_view.fold_on(loop)
        gateway = self._settings.gateway
        budgets = Budgets(gateway, len(self._doors), loop.time)
        self._hub.metrics.add(ConnectionFigures(budgets.all))
        servers = [
            HttpServer(
                door,
                # The Unix socket is open to this machine's user only, so it needs no TLS.
                self._tls if door.socket_path is None else None,
                budgets,
                gateway.idle_timeout_s,
            )
            for door in self._doors
        ]

        def sweep() -> None:
            loop.call_later(SWEEP_S, sweep)
            budgets.sweep()
            self._hub.request_lines.log_omitted()
            for watch in self._certificates:
                watch.look()

        sweep()

        def end(number: int, frame: FrameType | None) -> None:
            """End the servers after a signal; runs in the main thread, between two of its instructions."""
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._hub.begin_stop)
            for server in servers:
                server.handle_exit(number, frame)

        for number in _SIGNALS:
            signal.signal(number, end)
        parts = list(zip(self._doors, servers, listeners, strict=True))
        mine = [
            (door, server)
            for door, server, listener in parts
            if isinstance(listener, socket.socket) or listener.claim() is not None
        ]
        watch = asyncio.create_task(self._watch(mine, servers))
        calls = asyncio.create_task(self._webhooks.run())
        try:
            serving = [asyncio.create_task(self._serve_door(*part)) for part in parts]
            # When one server ends, the others end, too, after their requests under way.
            await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
            self._end(servers)
            await asyncio.gather(*serving, calls)
        finally:
            watch.cancel()
            calls.cancel()
            self._hub.request_lines.flush()
            await self._live_view.leave_loop()

    async def _serve_door(
        self, door: Door, server: HttpServer, listener: socket.socket | ClaimedSocket
    ) -> None:
        if isinstance(listener, socket.socket):
            await server.serve(sockets=[listener])
            return
        while (found := self._claimed(door, listener)) is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hub.stopping.wait(), _WATCH_S)
            if self._hub.stopping.is_set():
                return
        log.info("serving", door=door.name, socket=str(listener.path))
        await server.serve(sockets=[found])

    def _claimed(self, door: Door, listener: ClaimedSocket) -> socket.socket | None:
        """Return the socket when this gateway has it. Otherwise log the reason when it changes."""
        try:
            found, why = listener.claim(), "another gateway serves it"
        except TrunklineError as error:
            found, why = None, str(error)
        if found is None and self._not_served.get(door.name) != why:
            self._not_served[door.name] = why
            log.warning("not_served_here", door=door.name, socket=str(listener.path), why=why)
        return found

    def _end(self, servers: Sequence[HttpServer]) -> None:
        self._hub.begin_stop()
        for server in servers:
            server.should_exit = True

    async def _watch(self, mine: Sequence[tuple[Door, HttpServer]], servers: Sequence[HttpServer]) -> None:
        while not all(server.started for _, server in mine):
            await asyncio.sleep(0.01)
        for door, _ in mine:
            if door.socket_path is None:
                log.info("serving", door=door.name, host=door.host, port=door.port)
        if self._ready_file is not None:
            self._ready_file.touch()
        while self._live_view.failure is None:
            await asyncio.sleep(_WATCH_S)
        log.error("live_view_failed", error=type(self._live_view.failure).__name__)
        self._end(servers)


def main() -> int:
    """Run the gateway until SIGTERM or SIGINT, and return the exit code of the process.

    The exit code is 0 after a signal and 2 for invalid settings. After a TrunklineError, which is logged, it is
    the error's `exit_code`. The environment variable `TRUNKLINE_READY_FILE` names a file to create when the
    gateway answers requests.
    """
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
