"""The server of out-of-band commands (XP-11): `POST /commands` over a Unix socket, with signed documents.

**Delivers** each command as one record of `control/organism`. The record is the change, so every change is in
the ledger. **Acknowledges when** the log has settled the record and the listeners' mailboxes are opened or
closed. **Loses when** never silently: a command without an answer may or may not have been carried out. If it
was, it is refused as replayed when it is sent again.

**Refused**, in this order, and recorded in the stream `refused/commands`: a document that is too large, is not
well-formed, has unsafe XML such as a DTD (XP-03), or does not match `commands.xsd`; an unknown key; a wrong
signature; a time of signing too far from the present; a used nonce.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from datetime import UTC, datetime
from typing import Any, Final

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from connectors.doors.out_of_band.signed_commands import (
    COMMAND_BYTES,
    SIGNATURE_HEADER,
    AddListener,
    Command,
    CommandKey,
    CommandRefused,
    GetStatus,
    ListListeners,
    RemoveListener,
    read_command,
    read_keys,
)
from connectors.hub.organism.declared_files import describe_handlers
from connectors.hub.organism.organism_file import (
    AgentEntry,
    OrganismError,
    agent_of,
    entry_from,
    listener_of,
    load_organism,
)
from connectors.hub.services.hub import Hub
from connectors.hub.services.start_records import check_names
from connectors.hub.serving.answers import (
    INTERNAL,
    ApiError,
    RefusalRecorder,
    error_response,
    http_error_response,
    json_answer,
    row_as_json,
    unavailable,
)
from connectors.hub.serving.bounded_http import note_principal
from connectors.hub.serving.metrics import AccessLog
from connectors.hub.serving.strict_request import NotRead, StrictRequest
from connectors.operations.agents.organism_changes import Applied, apply_change
from schemas.settings.settings import PROJECT_ROOT
from schemas.streams.control.organism import Listener, ListenerAdded, ListenerRemoved, OrganismLoaded
from schemas.streams.refused.refusal import RefusalReason
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.wire.verdicts import (
    DUPLICATE,
    ILLEGAL_TRANSITION,
    MALFORMED,
    POLICY,
    SEQ_CONFLICT,
    TOO_LARGE,
    UNAUTHORIZED,
)

log = structlog.stdlib.get_logger(__name__)

DOOR: Final = "commands"
PATH: Final = "/commands"
# The largest difference between a command's time and ours.
WINDOW_S: Final = 300
REPLAYED: Final = "replayed"
_ROUTE: Final = f"POST {PATH}"
_STATUS: Final = {TOO_LARGE: 413, MALFORMED: 400, UNAUTHORIZED: 403, POLICY: 403}


class _Refused(ApiError):
    """A command is refused. `recorded` is the reason that the ledger records."""

    def __init__(self, recorded: RefusalReason, why: str, *, reason: str = "", status: int = 0) -> None:
        super().__init__(status or _STATUS[recorded], reason or recorded, why)
        self.recorded = recorded


class OutOfBandDoor:
    """The ASGI application (`app`) that serves out-of-band commands with the services of one gateway.

    Its only route is `POST /commands`. The gateway's program serves `app` on the Unix socket, never on a port.
    Every fault of a command becomes an HTTP answer with a JSON error, and refusals are recorded in the log.

    Args:
        hub: The gateway's services. They may be opened after this, but before `app` serves requests.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._nonces: dict[str, float] = {}
        self._refusals = RefusalRecorder(hub.appender.append_unattended, door=DOOR)
        routes = Starlette(
            routes=[Route(PATH, self._command, methods=["POST"])],
            exception_handlers={HTTPException: _unknown},
        )
        routes.router.redirect_slashes = False
        self.app = AccessLog(routes, hub.metrics, hub.request_lines, hub.answer_memory)

    async def _command(self, request: Request) -> Response:
        request.scope["trunkline_route"] = PATH
        principal = None
        try:
            body = await StrictRequest(request.scope, request.receive, COMMAND_BYTES).body()
            command = _read(body)
            key = await self._signer(command, body, request)
            principal = request.scope["trunkline_principal"] = key.name
            note_principal(request.scope, key.name)
            _check_time(command)
            self._check_new(command)
            try:
                return await self._act(command, key.name)
            except OrganismError as error:
                # The signature and the document are valid, but the content is not.
                raise _Refused(MALFORMED, str(error), reason=ILLEGAL_TRANSITION, status=409) from None
            except BackboneUnreachable:
                # Allow the same command again: the log knows whether it was carried out.
                self._nonces.pop(command.nonce, None)
                raise
        except ApiError as error:
            self._note(error, principal)
            return error_response(error.status_code, error.reason, str(error.detail), dict(error.headers or {}))
        except BackboneUnreachable as error:
            away = unavailable(f"{error}; 'trunkline organism show' shows whether it was carried out")
            return error_response(503, away.reason, str(away.detail), dict(away.headers or {}))
        except TrunklineError as error:
            return error_response(500, INTERNAL, str(error))
        except Exception as error:  # noqa: BLE001  its text may quote confidential input
            where = traceback.extract_tb(error.__traceback__)[-1]
            log.error("command_failed", error=type(error).__name__, where=f"{where.name}:{where.lineno}")
            return error_response(500, INTERNAL, "the gateway failed; its log says where")

    async def _signer(self, command: Command, body: bytes, request: Request) -> CommandKey:
        """Return the key that signed the command. Raises _Refused."""
        folder = await asyncio.to_thread(read_keys, self._hub.settings.command_keys_path)
        for name, why in folder.faults.items():
            log.warning("command_key_skipped", file=name, why=why)
        key = folder.keys.get(command.key_id)
        if key is None:
            raise _Refused(UNAUTHORIZED, "unknown key: it is not among the accepted command keys")
        given = request.headers.getlist(SIGNATURE_HEADER)
        if len(given) != 1 or not key.has_signed(body, given[0]):
            raise _Refused(UNAUTHORIZED, "the signature does not match the key and the command")
        return key

    def _check_new(self, command: Command) -> None:
        """Refuse a nonce that was used before.

        The log knows the nonces of commands that changed something. This process remembers those of commands
        that it refused: another gateway, or the next one, could accept these later.
        """
        now = time.monotonic()
        self._nonces = {nonce: at for nonce, at in self._nonces.items() if at > now - 2 * WINDOW_S}
        if command.nonce in self._nonces:
            raise _replayed()
        self._nonces[command.nonce] = now

    async def _act(self, command: Command, principal: str) -> Response:
        action = command.action
        if isinstance(action, RemoveListener):
            removal = ListenerRemoved(request_id=command.nonce, name=action.name)
            return await self._applied(removal, principal, {"listener": action.name})
        if isinstance(action, (ListListeners, GetStatus)):
            return json_answer(self._shown(action))
        if isinstance(action, AddListener):
            listener = await asyncio.to_thread(_listener, action)
            self._check_free([listener])
            addition = ListenerAdded(request_id=command.nonce, listener=listener)
            return await self._applied(addition, principal, {"listener": listener.name})
        file = self._hub.settings.xml_pump.organism_file
        if file is None:
            raise OrganismError("xml_pump.organism_file names no file to reload")
        organism = await asyncio.to_thread(load_organism, PROJECT_ROOT / file)
        self._check_free(organism.listeners)
        loaded = OrganismLoaded(request_id=command.nonce, digest=organism.digest, listeners=organism.listeners)
        answer = await self._applied(loaded, principal, {"listeners": len(organism.listeners)})
        self._hub.organism.fault = None
        return answer

    def _shown(self, action: ListListeners | GetStatus) -> dict[str, Any]:
        """Return the listeners without their schemas, or the numbers of the whole organism."""
        listeners = self._hub.listeners
        rows = listeners.active()
        if isinstance(action, GetStatus):
            shown: Any = len(rows)
        else:
            known = [{**row_as_json(row), "waiting": listeners.waiting(row.listener)} for row in rows]
            shown = [{k: v for k, v in row.items() if k not in ("xsd", "example")} for row in known]
        waiting = sum(listeners.waiting(row.listener) for row in rows)
        leased = sum(len(listeners.held(row.listener)) for row in rows)
        return {"version": listeners.version, "listeners": shown, "waiting": waiting, "leased": leased}

    def _check_free(self, listeners: list[Listener]) -> None:
        try:
            check_names(self._hub.live_view, [listener.name for listener in listeners])
        except OrganismError as error:
            raise _Refused(POLICY, str(error)) from None

    async def _applied(
        self, change: OrganismLoaded | ListenerAdded | ListenerRemoved, principal: str, said: dict[str, Any]
    ) -> Response:
        """Apply the change. Its record is written before anything else is done."""
        try:
            applied: Applied = await apply_change(self._hub, change, door=DOOR, principal=principal)
        except ApiError as error:
            if error.reason == SEQ_CONFLICT:
                raise _replayed() from None
            raise
        if applied.verdict == DUPLICATE:
            raise _replayed()
        answer = {"verdict": applied.verdict, **said, "pending": applied.pending}
        answer["version"] = self._hub.listeners.version
        return json_answer(answer, verdict=applied.verdict)

    def _note(self, error: ApiError, principal: str | None) -> None:
        """Record a refusal. The ledger already has a record that the fold rejected."""
        if isinstance(error, _Refused):
            self._refusals.record(error.recorded, str(error.detail)[:500], principal, _ROUTE)
        elif isinstance(error, NotRead):
            return
        elif error.reason in (MALFORMED, TOO_LARGE):
            reason: RefusalReason = MALFORMED if error.reason == MALFORMED else TOO_LARGE
            self._refusals.record(reason, str(error.detail)[:500], principal, _ROUTE)


def _read(body: bytes) -> Command:
    try:
        return read_command(body)
    except CommandRefused as error:
        raise _Refused(TOO_LARGE if error.reason == TOO_LARGE else MALFORMED, str(error)) from None


def _check_time(command: Command) -> None:
    off_s = (datetime.now(UTC) - command.issued).total_seconds()
    if abs(off_s) > WINDOW_S:
        when = "ago" if off_s > 0 else "from now"
        raise _Refused(
            UNAUTHORIZED,
            f"issued {abs(off_s):.0f} s {when}; a command is valid for {WINDOW_S} s around its time",
        )


def _listener(action: AddListener) -> Listener:
    """Return the listener that a command adds. Raises OrganismError."""
    where = "add-listener"
    entry = entry_from(dict(action.fields), where)
    if isinstance(entry, AgentEntry):
        return agent_of(entry)
    handlers = [] if entry.handler is None else [entry.handler]
    return listener_of(entry, describe_handlers(handlers) if handlers else {}, where)


def _replayed() -> _Refused:
    return _Refused(UNAUTHORIZED, "this command was sent before: its nonce is used", reason=REPLAYED)


async def _unknown(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown route or with a wrong method."""
    assert isinstance(error, HTTPException)  # noqa: S101  registered for HTTPException only
    return http_error_response(error.status_code, dict(error.headers or {}))
