"""The W3C trace context of an MQTT 5 message: the user property `traceparent`."""

from __future__ import annotations

import re
from typing import Final

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def well_formed_traceparent(properties: object) -> str | None:
    """Return the W3C trace context (`traceparent`) among the user properties of an MQTT 5 message.

    `properties` is the attribute of that name of paho's message. Returns None when there is no trace context,
    more than one, or an invalid one.
    """
    pairs = getattr(properties, "UserProperty", None) or ()
    found = [value for name, value in pairs if name == "traceparent"]
    if len(found) != 1 or _TRACEPARENT.fullmatch(found[0]) is None:
        return None
    return str(found[0])
