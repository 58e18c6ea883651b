"""The environment of a program that the command runs: no secrets, and the message or job that it is run for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

# Names of files and secrets with which the program could act in the agent's name.
_SECRETS: Final = (
    "TRUNKLINE_CREDENTIALS",
    "TRUNKLINE_AGENT_TOKEN",
    "TRUNKLINE_TOKEN",
    "TRUNKLINE_JOB_SECRET",
    "AGENT_KEY_PATH",
)


def environment_with(
    values: Mapping[str, str | None], *, has_secrets: bool, own: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return our environment for another program, with more variables.

    Args:
        values: The variables to add. None, and a text that no variable can have, leaves one out.
        has_secrets: Whether variables with secrets stay.
        own: The environment to begin with.
    """
    found = {name: value for name, value in own.items() if has_secrets or name not in _SECRETS}
    for name, text in values.items():
        found.pop(name, None)
        if text is not None and "\0" not in text:
            found[name] = text
    return found
