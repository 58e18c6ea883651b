"""Reading of the settings file, and of values from the environment into its tree of sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

SECRETS: Final = (("", "master_key"), ("mqtt", "password"), ("kafka", "sasl_password"))


class SettingsError(Exception):
    """A setting is wrong or unknown. The message names it. No program was started."""


def merge(base: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    """Set the value at `path` in a tree of sections. Raises SettingsError for a part that is not a section."""
    node = base
    for part in path[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise SettingsError(f"setting {'.'.join(path)}: {part} is not a section")
        node = child
    node[path[-1]] = value


def from_file(path: Path) -> dict[str, Any]:
    """Return the sections of a settings file.

    Raises SettingsError when the file cannot be read, is not a mapping or contains a secret.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read settings from {path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path}: expected a mapping of sections, found {type(loaded).__name__}")
    for section, name in SECRETS:
        node = loaded.get(section, {}) if section else loaded
        if isinstance(node, dict) and name in node:
            raise SettingsError(
                f"{name} in {path}: a secret comes from the environment, never from a file of conf"
            )
    return loaded
