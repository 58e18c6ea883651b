"""The MQTT password and client id of a job or an agent, derived from its secret.

Both sides know the secret, so the password need not be transmitted when the account is made. A person who reads
the password in transit can publish on the job's topic but cannot sign: the secret cannot be computed from it.
"""

from __future__ import annotations

import hmac
import re
from typing import Final

_PURPOSE: Final = "trunkline mqtt password/"
_ID_PURPOSE: Final = "trunkline mqtt client id/"
_ID_DIGITS: Final = 32
# The part before the point in a secret that a rotation made. A first secret has no point.
_TAG: Final = re.compile(r"([0-9a-f]{8})\.")
_TAGGED_USER: Final = re.compile(r"([0-9a-f]{8})\.[0-9a-f]{8}")


def job_user(job_id: str, secret: str) -> str:
    """Return the MQTT user name with which a job's publisher logs in.

    It is the job's id for the secret of the registration. For a secret that a rotation made, it is `<job
    id>.<tag>`. The tag is the part of the secret before the point. Two users are needed because an MQTT user
    has one password, and after a rotation both secrets are valid for a while.
    """
    tag = _TAG.match(secret)
    return job_id if tag is None else f"{job_id}.{tag[1]}"


def job_of_rotated_user(user: str) -> str | None:
    """Return the job id in an MQTT user name of the form `<job id>.<tag>`, or None for any other user name.

    `job_user` makes such names after a rotation of a job's secret.
    """
    found = _TAGGED_USER.fullmatch(user)
    return None if found is None else found[1]


def mqtt_password(secret: str, user: str) -> str:
    """Return the password of an MQTT user, derived from its secret by HMAC-SHA256: 64 lower-case hex digits.

    Args:
        secret: the secret of the job or agent.
        user: the MQTT user name: `job_user(...)` for a job, `agent.<name>` for an agent.
    """
    return hmac.digest(secret.encode("utf-8"), f"{_PURPOSE}{user}".encode(), "sha256").hex()


def mqtt_client_id(secret: str | bytes, name: str, broker: str = "") -> str:
    """Return an MQTT client id that only those who have the secret know: `<name>.<32 hex digits>`.

    A broker ends a session, or hands it over, for any client that connects under the session's client id (MQTT
    5, 3.1.3.1 and 4.1). It does not compare user names. So the id of a session must not be guessed by others.

    Args:
        secret: the secret from which the digits are derived by HMAC-SHA256.
        name: the part that a person can read in the broker's log, such as the user name.
        broker: the broker, if the owner of one broker must not learn the id at another one.
    """
    key = secret.encode("utf-8") if isinstance(secret, str) else secret
    digits = hmac.digest(key, f"{_ID_PURPOSE}{broker}/{name}".encode(), "sha256").hex()
    return f"{name}.{digits[:_ID_DIGITS]}"
