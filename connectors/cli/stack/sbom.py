"""The software bill of materials: each package and jar that the set-up installs, as a CycloneDX document.

It follows CycloneDX 1.6 (ECMA-424), with package URLs as in https://github.com/package-url/purl-spec.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.errors import TrunklineError

LOCK_FILES: Final = ("requirements.lock", "conf/java.lock")
_PACKAGE: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[.*\])?==(?P<version>[^\s;\\]+)")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
# As Ivy reports each module: organisation#name;revision. Two Ivys write one log, so it may be after other text.
_MODULE: Final = re.compile(r"found (?P<organisation>[^\s#]+)#(?P<name>[^;\s]+);(?P<version>\S+)")


def locked_packages(lock: str) -> Iterator[Component]:
    """Return the Python packages of the text of a lock file, each with the hashes of its files."""
    for entry in re.split(r"\n(?=\S)", lock):
        if found := _PACKAGE.match(entry):
            name, version = found["name"].lower(), found["version"]
            yield _component(PackageURL("pypi", None, name, version), _HASH.findall(entry))


def fetched_jars(jars: Path) -> Iterator[Component]:
    """Return the jars below the folder of the set-up, with the names that Ivy knew them by.

    Raises:
        TrunklineError: A jar is not in Ivy's log, or there is none.
    """
    log = jars / "fetch.log"
    said = "".join(path.read_text(encoding="utf-8") for path in sorted(jars.glob("fetch*.log")))
    modules = {f"{one['name']}-{one['version']}.jar": one for one in _MODULE.finditer(said)}
    found = {path.name: path for path in sorted(jars.glob("*/*.jar"))}
    if unknown := sorted(found.keys() - modules.keys()) or ([] if found else ["(no jars)"]):
        raise TrunklineError(
            f"{log} does not say where these are from: {', '.join(unknown)}. Remove {jars} and run "
            "trunkline set-up"
        )
    for name, path in found.items():
        module = modules[name]
        url = PackageURL("maven", module["organisation"], module["name"], module["version"])
        yield _component(url, [hashlib.sha256(path.read_bytes()).hexdigest()])


def _component(url: PackageURL, sha256: list[str]) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        group=url.namespace,
        name=url.name,
        version=url.version,
        purl=url,
        bom_ref=url.to_string(),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in sha256],
    )


def bill_of_materials(root: Path = PROJECT_ROOT) -> str:
    """Return the document as JSON, which differs only by its time for the same lock files and jars.

    Args:
        root: The checkout. Its lock files and the jars in `.jars` are listed.

    Raises:
        TrunklineError: The jars are not there, or not known to Ivy's log.
    """
    locks = [(root / name).read_text(encoding="utf-8") for name in LOCK_FILES]
    components = [one for lock in locks for one in locked_packages(lock)] + list(fetched_jars(root / ".jars"))
    contents = "\n".join(sorted(f"{one.purl} {sorted(h.content for h in one.hashes)}" for one in components))
    bom = Bom(components=components, serial_number=uuid5(NAMESPACE_URL, contents))
    # As in https://reproducible-builds.org/specs/source-date-epoch/
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        bom.metadata.timestamp = datetime.fromtimestamp(int(epoch), UTC)
    bom.metadata.component = Component(type=ComponentType.APPLICATION, name="trunkline", bom_ref="trunkline")
    bom.register_dependency(bom.metadata.component, components)
    return JsonV1Dot6(bom).output_as_string(indent=2)
