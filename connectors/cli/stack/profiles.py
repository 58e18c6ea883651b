"""Profiles: named sets of settings in `conf/profiles`, which `up --profile` copies to the settings file."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import yaml

from schemas.settings.settings import PROJECT_ROOT, Settings, load_settings, setting_origins, settings_file
from trunkline_agent.errors import Refused, UsageError
from trunkline_agent.private_files import replace_file

_FOLDER: Final = PROJECT_ROOT / "conf" / "profiles"
PROFILES: Final = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def take_over(profile: str, settings: Settings, check: Callable[[Settings], object]) -> Settings:
    """Write the settings of a profile to the settings file, unless they are set, and return all settings.

    Other commands then have them, too. Addresses may differ from the profile's if they are as many.

    Args:
        profile: A name in PROFILES.
        settings: The settings in force.
        check: Called with the new settings before anything is written. It raises if they cannot be.

    Raises:
        Refused: A setting of the profile is set to another value, or the settings file has other settings of
            the same section. The message has the lines for the file.
        UsageError: There is no such profile, or the settings file can have no lines (`/dev/null`).
    """
    if profile not in PROFILES:
        raise UsageError(f"no such profile: {profile}; there is {', '.join(PROFILES)}")
    text = (_FOLDER / f"{profile}.yaml").read_text(encoding="utf-8")
    sections = yaml.safe_load(text)
    wanted = {
        f"{section}.{name}": value for section, named in sections.items() for name, value in named.items()
    }
    origins = setting_origins()
    for name, value in wanted.items():
        found = reduce(getattr, name.split("."), settings)
        if name in origins and not _are_alike(found, value):
            raise Refused(f"{name} is {found} (from {origins[name]}), and {value} in the profile {profile}")
    missing = wanted.keys() - origins.keys()
    if not missing:
        check(settings)
        return settings
    target = settings_file()
    before = target.read_text(encoding="utf-8") if target.is_file() else ""
    if target.exists() and not target.is_file():
        raise UsageError(f"the settings file is {target}: set {', '.join(sorted(missing))} as variables")
    if sections.keys() & (yaml.safe_load(before) or {}).keys():
        raise Refused(f"{target} has settings of its own: add those of the profile {profile}:\n{text}")
    after = f"{before.rstrip()}\n\n{text}".lstrip()
    with TemporaryDirectory() as folder:
        draft = Path(folder) / target.name
        draft.write_text(after, encoding="utf-8")
        made = load_settings(file=draft)
    check(made)
    # Through a link, if it is one.
    replace_file(target.resolve(), after.encode(), target.stat().st_mode & 0o777 if before else 0o644)
    return made


def _are_alike(found: object, wanted: object) -> bool:
    """Return whether two values are equal, or lists of equally many addresses."""
    return found == wanted or (":" in str(wanted) and str(found).count(",") == str(wanted).count(","))
