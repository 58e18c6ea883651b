"""The requests of a delegator: submit a job, cancel a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trunkline_agent.errors import TrunklineError, UsageError
from trunkline_agent.hub.derived_keys import send_key
from trunkline_agent.hub.hub_requests import encoded, path_of, post_json
from trunkline_agent.hub.plans import Plan, Retries
from trunkline_agent.wire.ids import is_job_id
from trunkline_agent.wire.receipt import LogPosition


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job that was submitted.

    Attributes:
        job_id: Its id.
        secret: The secret with which its events are signed. The hub does not show it again. It is in no `repr`.
        position: The position of this request's record in the log.
    """

    job_id: str
    secret: str = field(repr=False)
    position: LogPosition


def submission(
    description: str,
    session: str | None,
    notify: Sequence[str] | None,
    broker: Mapping[str, Any] | None,
    key: str | None,
    patience_s: float,
) -> Plan[SubmittedJob]:
    """Register a job. See `Delegator.submit`."""
    body: dict[str, Any] = {
        "description": description,
        "session": session,
        "notify": None if notify is None else list(notify),
        "broker": None if broker is None else dict(broker),
    }
    if key is None:
        # The broker may have a password, of which no digest belongs into the log.
        hashed = {name: body[name] for name in ("description", "session", "notify") if body[name] is not None}
        key = send_key("job", encoded(hashed), None).text
    answer = yield from post_json(path_of("jobs"), body, retries=Retries(patience_s), key=key)
    try:
        return SubmittedJob(answer["job_id"], answer["secret"], LogPosition(*answer["position"]))
    except (KeyError, TypeError):
        raise _no_gateway() from None


def cancellation(job_id: str, reason: str, key: str | None, patience_s: float) -> Plan[str]:
    """Cancel a job. See `Delegator.cancel`."""
    if not is_job_id(job_id):
        raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
    path = path_of("jobs", job_id, "cancel")
    answer = yield from post_json(path, {"reason": reason}, retries=Retries(patience_s), key=key)
    try:
        return str(answer["status"])
    except (KeyError, TypeError):
        raise _no_gateway() from None


def _no_gateway() -> TrunklineError:
    return TrunklineError("the answer is not that of a Trunkline gateway", reason="not_a_gateway")
