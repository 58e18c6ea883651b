"""The MQTT password of a job or an agent, derived from its secret: both sides know it, and nobody has to send
it to the other.

Whoever reads the password on the wire can publish on the job's topic, but cannot sign: the secret does not
follow from it.
"""

from __future__ import annotations

import hmac
import re
from typing import Final

_PURPOSE: Final = "trunkline mqtt password/"
# What stands before the point in a secret that came by a rotation. A first secret has no point.
_TAG: Final = re.compile(r"([0-9a-f]{8})\.")
_TAGGED_USER: Final = re.compile(r"([0-9a-f]{8})\.[0-9a-f]{8}")


def job_user(job_id: str, secret: str) -> str:
    """The MQTT user of who has this secret of a job: the job's id, after a rotation `<job id>.<tag>` with what
    stands before the point in the secret. A user has one password, and in an overlap there are two.
    """
    tag = _TAG.match(secret)
    return job_id if tag is None else f"{job_id}.{tag[1]}"


def job_of_rotated_user(user: str) -> str | None:
    """The job of an MQTT user that came by a rotation, None for any other user."""
    found = _TAGGED_USER.fullmatch(user)
    return None if found is None else found[1]


def mqtt_password(secret: str, user: str) -> str:
    """The password of an MQTT user, a job's id or `agent.<name>`: 64 lower-case hex digits, HMAC-SHA256 under
    its secret.
    """
    return hmac.digest(secret.encode("utf-8"), f"{_PURPOSE}{user}".encode(), "sha256").hex()
