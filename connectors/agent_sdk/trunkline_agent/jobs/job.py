"""A job and its events, as the agent that works on it publishes them (JE-15 to JE-17, DL-08).

    with Job("0a1b2c3d", secret, hub=HubAccess("http://127.0.0.1:3200", token)) as job:
        job.started("build begins")
        job.progress("3 of 10", {"done": 3})

It checks, numbers and signs events, and keeps them on disk until they are confirmed.

**Delivers** each event at least once, in the order of seq, with the same bytes at every attempt. Only after a
rotation of the secret an event gets a new signature; the backbone recognises it by its content.
**Acknowledges when** the receipt confirms that the log has the event; without receipts, when the broker has it.
**Loses when** `wait_for_receipt=False` and the broker loses what it acknowledged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from trunkline_agent.errors import EventRejected, TrunklineError, UsageError
from trunkline_agent.jobs.deliveries import environment_doors, over_hub, over_mqtt
from trunkline_agent.outbox.delivery import Interruption
from trunkline_agent.outbox.outbox import JobOutbox, PendingEvent, content_fault
from trunkline_agent.wire.ids import is_job_id
from trunkline_agent.wire.job_event import (
    COMPLETED,
    ERROR,
    PERMISSION_REQUIRED,
    PROGRESS,
    SCHEMA_VERSION,
    STARTED,
    event_fault,
)
from trunkline_agent.wire.receipt import Receipt
from trunkline_agent.wire.signing import SIGNATURE_FIELD, Signer, sign_event, signed_bytes
from trunkline_agent.wire.strict_json import canonical, decode
from trunkline_agent.wire.unsafe_text import carries_token, unsafe_pattern
from trunkline_agent.wire.verdicts import REJECTED

if TYPE_CHECKING:
    from trunkline_agent.broker import BrokerAccess
    from trunkline_agent.credentials import Credentials, HubAccess, MqttAccess

log = logging.getLogger(__name__)
JOB_VARIABLE: Final = "TRUNKLINE_JOB_ID"
SECRET_VARIABLE: Final = "TRUNKLINE_JOB_SECRET"  # noqa: S105  a variable's name
STATE_VARIABLE: Final = "TRUNKLINE_STATE_DIR"
PATIENCE_S: Final = 30.0
PAYLOAD_BYTES: Final = 1024 * 1024
INTERRUPTED: Final = "interrupted"
_SET_THEM: Final = "the program that gives out the job sets them"
_LOCK_MARGIN_S: Final = 5.0


def event_body(
    job_id: str, event: str, detail: str, data: dict[str, Any] | None, secret: str
) -> dict[str, Any]:
    """Return the fields of a job event without its seq and its signature.

    Args:
        job_id: The job.
        event: The type of the event, such as `started`.
        detail: A text about the event for people.
        data: More fields, as JSON values.
        secret: The job's secret, which must not be in the event.

    Raises:
        UsageError: The event must not be sent. The message says why and does not have the secret.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    body: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "job_id": job_id,
        "event": event,
        "timestamp": now,
        "detail": detail,
        "data": {} if data is None else data,
    }
    fault = event_fault({**body, "seq": 1}) or _body_fault(body, secret)
    if fault is not None:
        raise UsageError(f"not sent: {fault}")
    return body


def signed_event(event: dict[str, Any], secret: str, payload_bytes: int) -> bytes:
    """Return an event, which has a seq, as signed canonical JSON.

    Raises UsageError if it has more than `payload_bytes` bytes.
    """
    payload = canonical(sign_event(event, secret))
    if len(payload) > payload_bytes:
        raise UsageError(f"the event has {len(payload)} bytes; at most {payload_bytes} are taken")
    return payload


def _signed_anew(pending: PendingEvent, secret: str) -> bytes | None:
    """Return a pending event signed with the current secret, None when it is signed with it already."""
    event, _ = decode(pending.wire_bytes)
    if Signer(secret).verifies(signed_bytes(event), event["data"].get(SIGNATURE_FIELD)):
        return None
    return canonical(sign_event(event, secret))


def _is_same_event(sent: dict[str, Any], body: dict[str, Any]) -> bool:
    """Return whether a sent event has the type, text and data of the event that is to be sent."""
    data = {k: v for k, v in sent["data"].items() if k != SIGNATURE_FIELD}
    return (sent["event"], sent["detail"], data) == (body["event"], body["detail"], body["data"])


def _body_fault(body: dict[str, Any], secret: str) -> str | None:
    if body["event"] == PERMISSION_REQUIRED and not body["detail"].strip():
        return f"detail: '{PERMISSION_REQUIRED}' must name the permission that it asks for"
    if carries_token(body):
        return "data.auth_token: a token must not travel in an event"
    if SIGNATURE_FIELD in body["data"]:
        return f"data.{SIGNATURE_FIELD}: only the publisher sets it"
    pattern = unsafe_pattern(body["detail"])
    if pattern is not None:
        return f"detail: contains text that looks like a {pattern} (docs: the table of unsafe texts)"
    return content_fault(body, secret)


class Job:
    """A job whose events this process publishes. Use it as a context manager, or call its methods alone.

    The context manager publishes `completed` when its block ends well, and `error` with the name of the
    exception's type when the block raises. After Ctrl-C the text is `interrupted`. It publishes nothing when
    the job was ended in the block, or before.

    Each method that publishes an event sends earlier unconfirmed events first, blocks until the event is
    confirmed or all attempts have failed, and makes a new connection. Only one process at a time can publish
    for a job in one `state_dir`; a second one waits.

    Args:
        job_id: The job.
        secret: The job's secret, which signs the events and is never sent.
        hub: The hub to send events to over HTTP, or credentials with a section `hub`. Its token is that of the
            worker that has the job, or of the delegator that registered it. It goes before `mqtt`.
        mqtt: The MQTT broker to publish at, or credentials with a section `mqtt`. Needs the extra `mqtt`.
        state_dir: The folder with the job's last seq and its unconfirmed events. None: that of
            TRUNKLINE_STATE_DIR, else a folder in the user's home.
        ca_certs: The file with the authority of the TLS of hub and broker; None: that of the credentials, or
            those that this machine trusts.
        patience_s: How long an event that the hub does not answer is sent again. Over MQTT the broker's times
            apply, see `Broker`.
        payload_bytes: The largest event that the backbone takes, in bytes.

    Raises:
        UsageError: The id or the secret is not valid, or neither `hub` nor `mqtt` is given.
    """

    def __init__(
        self,
        job_id: str,
        secret: str,
        *,
        hub: HubAccess | Credentials | None = None,
        mqtt: MqttAccess | BrokerAccess | Credentials | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        ca_certs: str | os.PathLike[str] | None = None,
        patience_s: float = PATIENCE_S,
        payload_bytes: int = PAYLOAD_BYTES,
    ) -> None:
        if not is_job_id(job_id):
            raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
        if not secret:
            raise UsageError("the job's secret is empty; 'trunkline jobs register' prints it once")
        self.job_id = job_id
        self._secret = secret
        if hub is not None:
            self._delivery = over_hub(job_id, hub, ca_certs, patience_s)
        elif mqtt is not None:
            self._delivery = over_mqtt(job_id, secret, mqtt, ca_certs)
        else:
            raise UsageError("a job needs a way to send its events: give hub or mqtt")
        self._state_dir = default_state_dir() if state_dir is None else Path(state_dir)
        self._payload_bytes = payload_bytes

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **options: Any) -> Self:
        """Return the job of TRUNKLINE_JOB_ID and TRUNKLINE_JOB_SECRET, with a way to send its events.

        That is the hub of TRUNKLINE_CREDENTIALS or of TRUNKLINE_HUB_URL and TRUNKLINE_AGENT_TOKEN. Without one,
        it is the broker of the credentials, or of MQTT_BROKER with MQTT_PORT, MQTT_TLS, MQTT_CA_CERTS,
        MQTT_CERTFILE, MQTT_KEYFILE, MQTT_USERNAME and MQTT_PASSWORD.

        Args:
            environment: The variables. None: those of this process.
            options: Arguments of the constructor, such as `state_dir`.

        Raises:
            UsageError: A variable is missing or not valid.
        """
        variables = os.environ if environment is None else environment
        missing = [name for name in (JOB_VARIABLE, SECRET_VARIABLE) if not variables.get(name)]
        if missing:
            raise UsageError(f"no job: {' and '.join(missing)} not set", advice=_SET_THEM)
        doors = {} if "hub" in options or "mqtt" in options else environment_doors(variables)
        found: dict[str, Any] = {"state_dir": variables.get(STATE_VARIABLE) or None, **doors, **options}
        return cls(variables[JOB_VARIABLE], variables[SECRET_VARIABLE], **found)

    def __repr__(self) -> str:
        return f"Job({self.job_id!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_by(error)

    def started(self, detail: str = "", data: dict[str, Any] | None = None) -> Receipt:
        """Publish that the work has begun. It can only be the first event of the job. See `publish`."""
        return self.publish(STARTED, detail, data)

    def progress(self, detail: str = "", data: dict[str, Any] | None = None) -> Receipt:
        """Publish how far the work is. See `publish`."""
        return self.publish(PROGRESS, detail, data)

    def permission_required(self, detail: str, data: dict[str, Any] | None = None) -> Receipt:
        """Publish that the work waits for the permission that `detail` names. See `publish`."""
        return self.publish(PERMISSION_REQUIRED, detail, data)

    def completed(self, detail: str = "", data: dict[str, Any] | None = None) -> Receipt:
        """Publish that the work is done, which ends the job. See `publish`."""
        return self.publish(COMPLETED, detail, data)

    def error(self, detail: str, data: dict[str, Any] | None = None) -> Receipt:
        """Publish that the work has failed, which ends the job. See `publish`."""
        return self.publish(ERROR, detail, data)

    def publish(
        self,
        event: str,
        detail: str = "",
        data: dict[str, Any] | None = None,
        *,
        wait_for_receipt: bool = True,
        interruption: Interruption | None = None,
    ) -> Receipt:
        """Publish one event, after earlier unconfirmed ones, and return its receipt.

        An event that ends the job may be published again until it is confirmed: it is the same event.

        Args:
            event: The type of the event, such as `started`.
            detail: A text about the event for people, of at most 500 characters.
            data: More fields, as JSON values.
            wait_for_receipt: Whether to wait for Trunkline's receipt. Otherwise the broker's PUBACK is enough,
                and the returned receipt has no verdict. Over HTTP there is always a receipt.
            interruption: Ends the wait from another thread; None: nothing does.

        Raises:
            UsageError: the event is invalid, or the job has ended; nothing was sent.
            EventRejected: Trunkline rejected this or an earlier event.
            Refused: the broker forbids publishing. The event stays in the outbox.
            BackboneUnreachable: the event is not confirmed. It stays in the outbox and is sent first at the
                next call, so do not publish it again.
            OutboxBusy: another process is publishing for this job.
        """
        body = event_body(self.job_id, event, detail, data, self._secret)
        with self._outbox() as outbox:
            outbox.renew(lambda pending: _signed_anew(pending, self._secret))
            wanted = self._enter(outbox, body)
            return self._deliver(outbox, wanted, wait_for_receipt, interruption)

    def resend(self, *, wait_for_receipt: bool = True, interruption: Interruption | None = None) -> int:
        """Send all events that are not confirmed yet, and return how many they were; 0 if there were none.

        An earlier process of this job may have left them. For the arguments and the errors see `publish`.
        """
        with self._outbox() as outbox:
            outbox.renew(lambda pending: _signed_anew(pending, self._secret))
            count = len(outbox.pending)
            if count:
                self._deliver(outbox, outbox.pending[-1], wait_for_receipt, interruption)
            return count

    def end_by(self, error: BaseException | None, *, interruption: Interruption | None = None) -> None:
        """End the job by the outcome of a block, unless it has ended. The context manager calls this.

        Args:
            error: The exception that the block raised; None if it ended well. If the end of the job cannot be
                published then, that is noted on the exception and raises nothing.
            interruption: Ends the wait from another thread; None: nothing does.
        """
        if self._has_ended():
            return
        event, detail = _outcome(error)
        try:
            self.publish(event, detail, interruption=interruption)
        except TrunklineError as failure:
            if error is None:
                raise
            error.add_note(f"the end of job {self.job_id} could not be published: {failure}")
            log.warning("the end of job %s could not be published: %s", self.job_id, failure)

    def _has_ended(self) -> bool:
        with self._outbox() as outbox:
            return outbox.ended_seq is not None

    def _outbox(self) -> JobOutbox:
        return JobOutbox(self._state_dir, self.job_id, self._delivery.longest_s + _LOCK_MARGIN_S)

    def _enter(self, outbox: JobOutbox, body: dict[str, Any]) -> PendingEvent:
        if outbox.ended_seq is not None:
            # The caller publishes the unconfirmed end again: it is the same event, not a second one.
            for pending in outbox.pending:
                if pending.seq == outbox.ended_seq and _is_same_event(pending.fields(), body):
                    return pending
            raise UsageError(f"job {self.job_id} has ended with seq {outbox.ended_seq}: nothing may follow")
        if body["event"] == STARTED and outbox.last_seq:
            raise UsageError(f"'{STARTED}' is the first event of a job; this one is at seq {outbox.last_seq}")
        return outbox.add(
            body["event"], lambda seq: signed_event({**body, "seq": seq}, self._secret, self._payload_bytes)
        )

    def _deliver(
        self,
        outbox: JobOutbox,
        wanted: PendingEvent,
        wait_for_receipt: bool,
        interruption: Interruption | None,
    ) -> Receipt:
        receipts: dict[int, Receipt] = {}

        def confirmed(pending: PendingEvent, receipt: Receipt) -> None:
            outbox.confirm(pending, rejected=receipt.verdict == REJECTED)
            receipts[pending.seq] = receipt

        self._delivery.deliver(
            outbox.pending,
            confirmed,
            wait_for_receipt=wait_for_receipt,
            interruption=interruption or Interruption(),
        )
        for receipt in (receipts[wanted.seq], *receipts.values()):
            if receipt.verdict == REJECTED:
                why = receipt.reason or "no reason given"
                raise EventRejected(
                    f"seq {receipt.seq} was rejected: {why}", receipt=receipt, reason=receipt.reason
                )
        return receipts[wanted.seq]


def default_state_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the outboxes: that of TRUNKLINE_STATE_DIR, else one in the user's home.

    The latter is `trunkline-agent` below XDG_STATE_HOME, or below `.local/state` of the home. Raises UsageError
    for a user without a home folder.
    """
    if found := environment.get(STATE_VARIABLE):
        return Path(found)
    state = Path(environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))  # noqa: PTH111 it raises
    if str(state).startswith(("~", "?")):
        raise UsageError(
            "this user has no home folder for outboxes", advice=f"set {STATE_VARIABLE}, or give state_dir"
        )
    return state / "trunkline-agent"


def _outcome(error: BaseException | None) -> tuple[str, str]:
    """Return the event that ends a job by the outcome of its block, and its text."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return COMPLETED, ""
    # Not the text of the exception, which may have a path or a secret.
    kind = type(error).__name__
    # An interrupted event loop cancels its main task. Its module need not be imported for a look at the name.
    return ERROR, INTERRUPTED if kind in ("KeyboardInterrupt", "CancelledError") else kind
