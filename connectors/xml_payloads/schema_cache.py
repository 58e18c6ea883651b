"""Derived schemas on disk (XP-01): `<folder>/<listener>/<root tag>/v1.xsd`, a new version for each change.

The files are for people and other programs. The pump compiles the schema of the class. A file that was edited
by hand is not used; it only causes the next version.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from connectors.xml_payloads.payload_types import PayloadType
from schemas.keys.first_file import make_first
from schemas.wire.ids import is_name


def cached_schema(folder: Path, listener: str, kind: PayloadType) -> Any:
    """Return the compiled schema of a payload, and write its text as the newest version on disk.

    Any number of processes may call it at once. Raises ValueError for a listener's name that CM-01 forbids, and
    OSError.
    """
    if not is_name(listener):
        raise ValueError(f"not a name of a listener: {listener!r}")
    versions = folder / listener / kind.root_tag
    versions.mkdir(parents=True, exist_ok=True)
    written = kind.xsd.encode()
    while True:
        newest = max(map(_version, versions.iterdir()), default=0)
        if newest and (versions / f"v{newest}.xsd").read_bytes() == written:
            return kind.compiled()
        # If another process makes this version first, the next round compares with that one.
        make_first(versions / f"v{newest + 1}.xsd", kind.xsd)


def _version(path: Path) -> int:
    found = re.fullmatch(r"v([1-9][0-9]{0,8})\.xsd", path.name)
    return int(found[1]) if found else 0
