"""The per-job brokers (JE-13): broker settings of a job, called overlays, that override those of the stack."""

from __future__ import annotations

from typing import Any

import orjson

from connectors.operations.rules.job_models import BrokerRequest
from schemas.keys.sealing import Keyring, UnsealError, broker_password_purpose
from schemas.streams.job.job_registry import BrokerOverlay
from trunkline_agent.errors import TrunklineError


def sealed_overlay(wanted: BrokerRequest, keyring: Keyring) -> BrokerOverlay:
    """Return a job's requested broker in the form that is stored in the log: with its password sealed.

    The sealed password can be opened only for the same host, port and user. A request without a password gives
    a broker without one.
    """
    fields = wanted.model_dump(exclude={"password"})
    if wanted.password is not None:
        purpose = broker_password_purpose(wanted.host, wanted.port, wanted.username)
        fields["sealed_password"] = keyring.seal(wanted.password.get_secret_value().encode("utf-8"), purpose)
    return BrokerOverlay(**fields)


def opened_overlay(overlay: str | None, keyring: Keyring) -> dict[str, Any] | None:
    """Return the fields of a job's broker with its password in clear text, for the session that picks the job.

    `overlay` is the broker as JSON with a sealed password; None: the job has no broker of its own, and None is
    returned. Raises TrunklineError when no master key opens the password.
    """
    if overlay is None:
        return None
    fields: dict[str, Any] = orjson.loads(overlay)
    sealed = fields.pop("sealed_password", None)
    fields["password"] = None
    if sealed is not None:
        purpose = broker_password_purpose(fields.get("host"), fields.get("port"), fields.get("username"))
        try:
            fields["password"] = keyring.open(sealed, purpose).decode("utf-8")
        except UnsealError as error:
            raise TrunklineError(f"the broker's password cannot be opened: {error}") from None
    return fields
