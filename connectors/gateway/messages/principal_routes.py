"""Principals and their tokens (operator only), and a look into a mailbox."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterable
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query, Request, Response

from connectors.gateway.rules.participant_models import ClearedAnswer
from connectors.gateway.rules.xml_recipients import is_listener
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import asks_for
from connectors.gateway.web.answers import ApiError, json_answer, malformed, refuse_rejected, row_as_json
from connectors.gateway.web.idempotency import TOKEN_WINDOW_S, IdempotencyKey, derived_token, request_uuid
from connectors.gateway.web.models import (
    ERRORS,
    NAME_PATTERN,
    MailboxFilter,
    MessagesAnswer,
    NoFields,
    PrincipalAnswer,
    PrincipalRequest,
    PrincipalsAnswer,
    TokenAnswer,
)
from connectors.gateway.web.policy import Action
from connectors.gateway.web.refusals import DOOR
from connectors.live.live_view import LiveView
from schemas.fold.view_rows import (
    MAILBOX_VIEW,
    MESSAGE_BODIES,
    REGISTRY_PRINCIPALS,
    MessageBodyRow,
    MessageRow,
    PrincipalRow,
    Row,
)
from schemas.streams.mailboxes.mailbox_requests import clearing_record
from schemas.streams.principal.principals import (
    ACTIVE,
    RESERVED_PRINCIPALS,
    addition_record,
    new_token,
    revocation_record,
)
from schemas.wire.ids import NAME_LIMIT
from schemas.wire.message import CLEARED, DEFAULT_REALM
from schemas.wire.verdicts import ACCEPTED, DUPLICATE, POLICY, SEQ_CONFLICT

PRINCIPALS: Final = "/api/hub/principals"
NamePath = Annotated[str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT)]


def add_principal_routes(app: FastAPI, hub: Hub) -> None:
    """Add the routes under `/api/hub/principals`."""

    @app.post(PRINCIPALS, status_code=201, response_model=TokenAnswer, responses=ERRORS)
    @asks_for(Action.PRINCIPAL_ADD)
    async def add_principal(request: Request, body: PrincipalRequest, key: IdempotencyKey = None) -> Response:
        """Add a principal. Its token is told here."""
        if body.principal in RESERVED_PRINCIPALS:
            raise malformed("principal: this name is reserved")
        caller = request.state.caller.principal
        if is_listener(hub, body.principal):
            why = "a listener has this name"
            hub.refusals.record(POLICY, why, caller, f"POST {PRINCIPALS}")
            raise ApiError(403, POLICY, why)
        made = request_uuid(caller, key)
        known = hub.live_view.row(REGISTRY_PRINCIPALS, body.principal)
        sha256 = known.token_sha256 if isinstance(known, PrincipalRow) else None
        token = new_token() if key is None else derived_token(hub.keyring, made, body.principal, sha256)
        record = addition_record(body.principal, body.role, token, door=DOOR, principal=caller)
        settled = refuse_rejected(await hub.appender.settle(record))
        if settled.verdict == DUPLICATE:
            _check_retold(_principal(hub, body.principal))
        answer = {"principal": body.principal, "role": body.role, "token": token}
        return json_answer(answer, 201, settled.verdict)

    @app.get(PRINCIPALS, response_model=PrincipalsAnswer, responses=ERRORS)
    @asks_for(Action.PRINCIPAL_LIST)
    async def list_principals() -> Response:
        """List all principals by name."""
        rows = [row for row in hub.live_view.rows(REGISTRY_PRINCIPALS) if isinstance(row, PrincipalRow)]
        return json_answer({"principals": [row_as_json(r) for r in sorted(rows, key=lambda r: r.principal)]})

    @app.post(f"{PRINCIPALS}/{{name}}/revoke", response_model=PrincipalAnswer, responses=ERRORS)
    @asks_for(Action.PRINCIPAL_REVOKE)
    async def revoke_principal(
        request: Request, name: NamePath, body: NoFields | None = None, key: IdempotencyKey = None
    ) -> Response:
        """Revoke a principal's token, for ever. A second time changes nothing."""
        record = revocation_record(name, door=DOOR, principal=request.state.caller.principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        row = _principal(hub, name)
        return json_answer(None if row is None else row_as_json(row), verdict=settled.verdict)


def add_mailbox_routes(app: FastAPI, hub: Hub) -> None:
    """Add the routes under `/api/hub/mailboxes`."""

    @app.get("/api/hub/mailboxes/{realm}/{name}", response_model=MessagesAnswer, responses=ERRORS)
    @asks_for(Action.MAILBOX_READ, _owner_of_mailbox)
    async def peek(realm: NamePath, name: NamePath, wanted: Annotated[MailboxFilter, Query()]) -> Response:
        """Show the newest messages of a mailbox, or the oldest that are pending, and take none."""
        if wanted.pending:
            waiting = hub.mailboxes.waiting((realm, name))
            found = await asyncio.to_thread(_pending, hub.live_view, f"{realm}/{name}", waiting, wanted)
            return json_answer(found)
        return json_answer(await asyncio.to_thread(_messages, hub.live_view, realm, name, wanted.limit))

    @app.post("/api/hub/mailboxes/{realm}/{name}/clear", response_model=ClearedAnswer, responses=ERRORS)
    @asks_for(Action.MAILBOX_CLEAR)
    async def clear_mailbox(
        request: Request,
        realm: NamePath,
        name: NamePath,
        body: NoFields | None = None,
        key: IdempotencyKey = None,
    ) -> Response:
        """Take all out of a mailbox that waits there. The same key again takes nothing, and says 0."""
        principal = request.state.caller.principal
        waiting = hub.mailboxes.waiting((realm, name))
        request_id = str(request_uuid(principal, key))
        record = clearing_record(realm, name, request_id, door=DOOR, principal=principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        cleared = 0
        if settled.verdict == ACCEPTED:
            wanted = {*waiting, *hub.mailboxes.messages((realm, name))}
            rows = (hub.live_view.row(MAILBOX_VIEW, f"{realm}/{name}/{one}") for one in wanted)
            # One that is not in memory any more has just become final, with very many others.
            cleared = sum(row is None or _is_cleared(row, settled.logged_at_us) for row in rows)
        return json_answer({"cleared": cleared}, verdict=settled.verdict)


def _is_cleared(row: Row, moment_us: int) -> bool:
    return isinstance(row, MessageRow) and row.status == CLEARED and row.ended_at == moment_us


def _principal(hub: Hub, name: str) -> PrincipalRow | None:
    row = hub.live_view.row(REGISTRY_PRINCIPALS, name)
    return row if isinstance(row, PrincipalRow) else None


def _check_retold(row: PrincipalRow | None) -> None:
    """Raise ApiError (409) when a token is not told again."""
    if row is None or row.status != ACTIVE:
        raise ApiError(409, SEQ_CONFLICT, "this principal was added by the same request, and is revoked")
    if time.time() - row.added_at / 1e6 > TOKEN_WINDOW_S:
        raise ApiError(409, SEQ_CONFLICT, "this principal was added by the same request, too long ago")


async def _owner_of_mailbox(request: Request) -> str | None:
    # A principal's name is known in one realm only; the others' names are their own affair.
    if request.path_params.get("realm") != DEFAULT_REALM:
        return None
    return str(request.path_params.get("name"))


def _messages(live_view: LiveView, realm: str, name: str, limit: int) -> dict[str, Any]:
    rows = [
        row
        for row in live_view.rows(MAILBOX_VIEW)
        if isinstance(row, MessageRow) and row.recipient == name and row.realm == realm
    ]
    newest = heapq.nlargest(limit, rows, key=_age_of)
    return {"messages": [_with_body(live_view, row) for row in reversed(newest)], "total": len(rows)}


def _pending(
    live_view: LiveView, mailbox: str, message_ids: Iterable[str], wanted: MailboxFilter
) -> dict[str, Any]:
    found = (live_view.row(MAILBOX_VIEW, f"{mailbox}/{message_id}") for message_id in message_ids)
    rows = [row for row in found if isinstance(row, MessageRow)]
    # The last of the page before may have been taken meanwhile; its row is there still.
    last = None if wanted.after is None else live_view.row(MAILBOX_VIEW, f"{mailbox}/{wanted.after}")
    left = [row for row in rows if not isinstance(last, MessageRow) or _age_of(row) > _age_of(last)]
    page = heapq.nsmallest(wanted.limit, left, key=_age_of)
    return {"messages": [_with_body(live_view, row) for row in page], "total": len(rows)}


def _age_of(row: MessageRow) -> tuple[int, str]:
    return row.posted_at, row.message_id


def _with_body(live_view: LiveView, row: MessageRow) -> dict[str, Any]:
    body = live_view.row(MESSAGE_BODIES, f"{row.realm}/{row.recipient}/{row.message_id}")
    said = {}
    if isinstance(body, MessageBodyRow):
        said = {"body": body.body, "content_type": body.content_type}
    return {"body": None, "content_type": None, **row_as_json(row), **said}
