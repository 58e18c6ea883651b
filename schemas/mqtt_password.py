"""A job's MQTT password, derived from its secret: both sides know it, and nobody has to send it to the other.

Whoever reads the password on the wire can publish on the job's topic, but cannot sign: the secret does not
follow from it.
"""

from __future__ import annotations

import hmac
from typing import Final

_PURPOSE: Final = "trunkline mqtt password/"


def mqtt_password(secret: str, job_id: str) -> str:
    """The password of the MQTT user `job_id`: 64 lower-case hex digits, HMAC-SHA256 under the job's secret."""
    return hmac.digest(secret.encode("utf-8"), f"{_PURPOSE}{job_id}".encode(), "sha256").hex()
