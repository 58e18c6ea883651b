"""The MQTT password of a job or an agent, derived from its secret.

Both sides know the secret, so the password need not be transmitted when the account is made. A person who reads
the password in transit can publish on the job's topic but cannot sign: the secret cannot be computed from it.
"""

from __future__ import annotations

import hmac
import re
from typing import Final

_PURPOSE: Final = "trunkline mqtt password/"
# The part before the point in a secret that a rotation made. A first secret has no point.
_TAG: Final = re.compile(r"([0-9a-f]{8})\.")
_TAGGED_USER: Final = re.compile(r"([0-9a-f]{8})\.[0-9a-f]{8}")


def job_user(job_id: str, secret: str) -> str:
    """Return the MQTT user for a job's secret.

    It is the job's id. After a rotation it is `<job id>.<tag>`, where the tag is the part of the secret before
    the point. An MQTT user has one password, and while the old and the new secret overlap there are two.
    """
    tag = _TAG.match(secret)
    return job_id if tag is None else f"{job_id}.{tag[1]}"


def job_of_rotated_user(user: str) -> str | None:
    """Return the job of an MQTT user that a rotation created, or None for any other user."""
    found = _TAGGED_USER.fullmatch(user)
    return None if found is None else found[1]


def mqtt_password(secret: str, user: str) -> str:
    """Return the password of an MQTT user: 64 lower-case hex digits.

    It is an HMAC-SHA256 under the user's secret. `user` is by `job_user`, or `agent.<name>`.
    """
    return hmac.digest(secret.encode("utf-8"), f"{_PURPOSE}{user}".encode(), "sha256").hex()
