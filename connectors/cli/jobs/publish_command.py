"""Publishes one event of a job over MQTT, or with --http over HTTP, and waits until it is in the log.

The event is numbered, signed with the job's secret and kept in an outbox on disk until it is confirmed. The
secret comes from --secret-file, else from the variable TRUNKLINE_JOB_SECRET, else from the file that
'jobs register' or 'jobs pick' wrote on this machine; never from an argument. At the MQTT broker the job is a
user of its own, with a password that is derived from its secret. If the job has a broker of its own, which
'jobs register' and 'jobs pick' store beside the secret, the event goes there.

  export TRUNKLINE_JOB_SECRET=...      (printed once by: trunkline jobs register)
  trunkline publish --job 0a1b2c3d --event started --detail "build begins"
  trunkline publish --job 0a1b2c3d --event progress --detail "3 of 10" --data '{"done": 3}'
  trunkline publish --job 0a1b2c3d --event completed --detail "all green"
  trunkline publish --job 0a1b2c3d --event completed --http    (with TRUNKLINE_TOKEN, at gateway.url)

Exit codes: 0 in the log; 2 the event must not be sent (the message says why); 4 rejected, with the reason, or
the broker refused the login, and then the event stays in the outbox as with 5; 5 not confirmed: it stays in the
outbox and is sent first at the next publish, so do not publish it again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.arguments import path
from connectors.cli.shared.call import Call
from connectors.plumbing.gateway_client.gateway_access import read_token
from connectors.tools.job_tools.job_files import find_secret, with_job_broker
from schemas.settings.settings import Settings
from trunkline_agent.command.command_options import read_secret as read_secret_file
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import UsageError
from trunkline_agent.jobs.job import SECRET_VARIABLE, Job
from trunkline_agent.wire.job_event import EVENTS
from trunkline_agent.wire.receipt import Receipt
from trunkline_agent.wire.strict_json import MalformedJsonError, decode

_STATE_FOLDER = "publisher"
_ATTEMPTS_MOST = 100
_PATIENCE_S = 4.0


ARGUMENTS = (
    argument("--job", "the job: 8 lower-case hex digits", required=True, metavar="ID"),
    argument("--event", "what happened; completed and error end the job", choices=EVENTS),
    argument(
        "--detail",
        "at most 500 characters; no paths, no NAME=value, no passwords or tokens",
        default="",
        metavar="TEXT",
    ),
    argument("--data", "a JSON object, or - to read it from standard input", metavar="JSON"),
    flag("--no-receipt", "wait only for the broker's PUBACK; a broker that crashes then may lose the event"),
    argument(
        "--attempts",
        f"connections to try, 1 to {_ATTEMPTS_MOST} (default: the setting mqtt.publish_attempts)",
        type=int,
        metavar="N",
    ),
    flag("--resend", "only send what is still in the outbox"),
    flag("--http", "send to the gateway; the token is that of the job's worker or of who registered the job"),
    path("--secret-file", "a 0600 file with the job's secret"),
    path("--state-dir", "where seq and outbox are kept", "DIR"),
    flag("--json", "print the receipt as one JSON object"),
)


def run(call: Call) -> int:
    """Run `trunkline publish`: publish one event or resend the outbox, print the receipt, and return 0.

    Raises TrunklineError: UsageError for an invalid event, Refused for a rejected one, BackboneUnreachable if
    it was not confirmed and stays in the outbox.
    """
    if (call.event is None) != call.resend:
        raise UsageError("give --event, or --resend to send only what is in the outbox")
    if call.attempts is not None:
        if not 1 <= call.attempts <= _ATTEMPTS_MOST:
            raise UsageError(f"--attempts: expected 1 to {_ATTEMPTS_MOST}, not {call.attempts}")
        mqtt = call.settings.mqtt.model_copy(update={"publish_attempts": call.attempts})
        call.settings = call.settings.model_copy(update={"mqtt": mqtt})
    if call.http and (call.no_receipt or call.attempts is not None):
        raise UsageError("--no-receipt and --attempts are for MQTT; with --http the answer is the receipt")
    data = _read_data(call.data)
    state_dir = call.state_dir or call.settings.data_path / _STATE_FOLDER
    secret = read_secret(call.secret_file, call.settings, call.job)
    own = call.settings if call.http else with_job_broker(call.settings, call.job, call.secret_file)
    return _publish(call, _job(call, own, secret, state_dir), data)


def _job(call: Call, own: Settings, secret: str, state_dir: Path) -> Job:
    hub = HubAccess(call.settings.gateway_url, read_token(call.settings)) if call.http else None
    return Job(
        call.job,
        secret,
        hub=hub,
        mqtt=own.mqtt,
        ca_certs=call.settings.gateway.ca_certs,
        state_dir=state_dir,
        patience_s=_PATIENCE_S,
        payload_bytes=call.settings.limits.payload_bytes,
    )


def _publish(call: Call, publisher: Job, data: dict[str, Any] | None) -> int:
    if call.resend:
        count = publisher.resend(wait_for_receipt=not call.no_receipt)
        print(json.dumps({"job_id": call.job, "resent": count}) if call.json else f"{count} resent")
        return 0
    receipt = publisher.publish(call.event, call.detail, data, wait_for_receipt=not call.no_receipt)
    print(_as_json(call.job, receipt) if call.json else _as_text(call, receipt))
    return 0


def read_secret(file: Path | None, settings: Settings, job_id: str) -> str:
    """Return the secret of a job from `file`, or without a file from the environment or this machine's store.

    `file` is the value of `--secret-file`, or None. The environment variable is TRUNKLINE_JOB_SECRET. The store
    is the file that 'jobs register' wrote. Raises UsageError if there is no secret, or `file` cannot be read or
    is readable by others.
    """
    if file is not None:
        return read_secret_file(str(file))
    found = os.environ.get(SECRET_VARIABLE, "").strip() or find_secret(settings, job_id)
    if not found:
        raise UsageError(f"no secret: set {SECRET_VARIABLE} or give --secret-file")
    return found


def _read_data(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found, _ = decode(sys.stdin.buffer.read() if text == "-" else os.fsencode(text))
    except MalformedJsonError as error:
        raise UsageError(f"--data: {error}; an example: --data '{{\"done\": 3}}'") from None
    if not isinstance(found, dict):
        raise UsageError("--data: expected a JSON object")
    return found


def _as_json(job_id: str, receipt: Receipt) -> str:
    position = receipt.position
    found = {name: getattr(receipt, name) for name in ("seq", "ce_id", "verdict", "reason")}
    place = None if position is None else [position.partition, position.offset]
    return json.dumps({"job_id": job_id, **found, "position": place})


def _as_text(call: Call, receipt: Receipt) -> str:
    what, place = f"{call.job}: {call.event} has seq {receipt.seq}", receipt.position
    if place is None:
        return f"{what}, taken by the MQTT broker (no receipt asked for)"
    verdict = f", {receipt.verdict}" if receipt.verdict else ""
    return f"{what}, in the log at partition {place.partition}, offset {place.offset}{verdict}"
