"""The MQTT password of a job or an agent, derived from its secret: both sides know it, and nobody has to send
it to the other.

Whoever reads the password on the wire can publish on the job's topic, but cannot sign: the secret does not
follow from it.
"""

from __future__ import annotations

import hmac
from typing import Final

_PURPOSE: Final = "trunkline mqtt password/"


def mqtt_password(secret: str, user: str) -> str:
    """The password of an MQTT user, a job's id or `agent.<name>`: 64 lower-case hex digits, HMAC-SHA256 under
    its secret.
    """
    return hmac.digest(secret.encode("utf-8"), f"{_PURPOSE}{user}".encode(), "sha256").hex()
