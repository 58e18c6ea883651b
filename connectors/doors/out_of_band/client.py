"""The client of out-of-band commands: it signs a command and sends it to the gateway's Unix socket (XP-11).

answer = give_command(settings, RemoveListener("search"))
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from connectors.doors.out_of_band.signed_commands import (
    SIGNATURE_HEADER,
    Action,
    command_bytes,
    key_id,
    load_private_key,
    private_key_file,
    sign,
)
from schemas.settings.settings import Settings
from schemas.streams.control.organism import TIMEOUT_MS_MOST
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.hub.http_exchange import ProtocolFault, RequestHead
from trunkline_agent.hub.hub_address import HubAddress
from trunkline_agent.hub.plans import Request
from trunkline_agent.hub.sync_connection import SyncConnection
from trunkline_agent.sockets import address_of
from trunkline_agent.terminal_text import escaped

PATH: Final = "/commands"
# A removal is answered when no handler of the listener runs any more, and the time limit of a handler bounds
# that.
ANSWER_S: Final = TIMEOUT_MS_MOST / 1000 + 60
# The address in the header `Host` of a request over a Unix socket.
_HERE: Final = HubAddress("http://localhost", "localhost", 80, is_tls=False, prefix="")
_MESSAGE_LIMIT: Final = 600
_ERRORS: Final = {
    400: UsageError,
    403: Refused,
    404: NotFound,
    409: Refused,
    413: UsageError,
    503: BackboneUnreachable,
}


def give_command(settings: Settings, action: Action, key_file: Path | None = None) -> dict[str, Any]:
    """Sign a command, send it to the gateway on this machine, and return the gateway's JSON answer.

    It blocks until the command has taken effect. A removal waits for the listener's running handlers, which are
    not aborted: up to an hour, the largest time limit of a handler. After 3660 s without an answer it raises.

    Args:
        settings: The settings, which name the gateway's Unix socket and the folder of keys.
        action: The command to carry out.
        key_file: The PEM file of the private key to sign with; None for the operator's key.

    Raises:
        UsageError: The command was malformed or too large (400, 413), or there is no usable key.
        Refused: The gateway refused the command (403, 409).
        NotFound: The command names an unknown listener (404).
        BackboneUnreachable: No gateway serves commands here, or it did not answer, or it answered 503. In the
            last two cases the command may or may not have been carried out.
        TrunklineError: The gateway answered with another status, such as 500.
    """
    key = load_private_key(key_file or private_key_file(settings))
    try:
        body = command_bytes(
            action, nonce=secrets.token_hex(16), issued=datetime.now(UTC), key_id=key_id(key.public_key())
        )
    except ValueError as error:
        raise UsageError(f"this text cannot be in a command: {error}") from None
    status, answer = post_command(settings.command_socket, body, sign(key, body))
    if status == 200:
        return answer
    raise _error(status, answer)


def post_command(
    path: Path, body: bytes, signature: str | None, timeout_s: float = ANSWER_S
) -> tuple[int, dict[str, Any]]:
    """Send a signed document to the gateway's Unix socket, and return the HTTP status and the decoded answer.

    No status raises an error: the caller checks it. An answer that is no JSON object is returned as an empty
    dict.

    Args:
        path: The gateway's Unix socket, the setting `xml_pump.command_socket`.
        body: The command's XML document, as `command_bytes` returns it.
        signature: The value of the header `X-Signature`, as `sign` returns it; None sends no such header.
        timeout_s: The longest time in seconds to wait for the answer; by default 3660 s.

    Raises:
        BackboneUnreachable: No gateway listens on the socket, or it did not answer in time.
    """

    def connect(until: float) -> socket.socket:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.settimeout(max(0.001, until - time.monotonic()))
            with address_of(path) as address:
                found.connect(address)
        except OSError:
            found.close()
            raise
        return found

    headers = {"Content-Type": "application/xml"}
    if signature is not None:
        headers[SIGNATURE_HEADER] = signature
    with closing(SyncConnection(_HERE, RequestHead(_HERE, None), None, connect)) as connection:
        try:
            connection.open(timeout_s)
        except OSError as error:
            raise BackboneUnreachable(
                f"no gateway takes commands at {path} ({error.strerror or error}). 'trunkline up' starts it; "
                "commands are given on its own machine, to xml_pump.command_socket"
            ) from None
        try:
            request = Request("POST", PATH, headers=headers, body=body)
            answer = connection.answer(request, time.monotonic() + timeout_s)
            return answer.status, _decoded(answer.body)
        except (OSError, ProtocolFault) as error:
            why = str(error) or type(error).__name__
            raise BackboneUnreachable(
                f"the gateway at {path} did not answer ({why}). It may have carried out the command: "
                "see 'trunkline organism show'"
            ) from None


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _error(status: int, answer: dict[str, Any]) -> TrunklineError:
    reason, text = str(answer.get("reason", "")), str(answer.get("message", f"HTTP status {status}"))
    said = escaped(text if not reason or reason in text else f"{text} ({reason})")[:_MESSAGE_LIMIT]
    kind = _ERRORS.get(status)
    return TrunklineError(f"the gateway answered {status}: {said}") if kind is None else kind(said)
