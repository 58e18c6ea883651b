"""The environment of a program that the command runs: no secrets, and the message or job that it is run for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

# With these variables the program could act in the agent's name.
_SECRETS: Final = ("AGENT_KEY_PATH", "MQTT_PASSWORD", "MQTT_KEYFILE")
_WORDS: Final = ("CREDENTIALS", "TOKEN", "SECRET", "PASSWORD")


def environment_with(
    values: Mapping[str, str | None], *, has_secrets: bool, own: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return our environment for another program, with more variables.

    Args:
        values: The variables to add. None, and a text that no variable can have, leaves one out.
        has_secrets: Whether variables with secrets stay.
        own: The environment to begin with.
    """
    found = {name: value for name, value in own.items() if has_secrets or not _is_secret(name)}
    for name, text in values.items():
        found.pop(name, None)
        if text is not None and "\0" not in text:
            found[name] = text
    return found


def _is_secret(name: str) -> bool:
    return name in _SECRETS or (name.startswith("TRUNKLINE") and any(word in name for word in _WORDS))
