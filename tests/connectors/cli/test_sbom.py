"""`trunkline build sbom`: all that the set-up installs, valid by the schema of CycloneDX."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from referencing import Registry, Resource

from connectors.cli.main import main
from connectors.cli.stack.sbom import bill_of_materials, fetched_jars, locked_packages
from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.errors import TrunklineError

pytestmark = pytest.mark.requirement("DP-06")

SCHEMAS = files("cyclonedx.schema") / "_res"
JAR = "found org.example#one;1.0 in public\n"


def schema(name: str) -> dict[str, Any]:
    """A schema of the standard, as the library has it."""
    return dict(json.loads((SCHEMAS / f"{name}.SNAPSHOT.schema.json").read_text()))


def lock(name: str) -> str:
    return (PROJECT_ROOT / name).read_text()


def test_the_document_is_valid_and_has_each_package_and_each_jar_once(tmp_path: Path) -> None:
    out = tmp_path / "trunkline.cdx.json"
    assert main(["build", "sbom", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    others = {f"{name}.SNAPSHOT.schema.json": schema(name) for name in ("spdx", "jsf-0.82")}
    registry = Registry().with_resources(
        (f"http://cyclonedx.org/schema/{name}", Resource.from_contents(found)) for name, found in others.items()
    )
    Draft7Validator(schema("bom-1.6"), registry=registry).validate(document)
    urls = [one["purl"] for one in document["components"]]
    assert len(urls) == len(set(urls))
    locked = re.findall(r"^[A-Za-z][^=\s]*==", lock("requirements.lock") + lock("conf/java.lock"), re.MULTILINE)
    jars = list((PROJECT_ROOT / ".jars").glob("*/*.jar"))
    assert sum(url.startswith("pkg:pypi/") for url in urls) == len(locked)
    assert sum(url.startswith("pkg:maven/") for url in urls) == len({jar.name for jar in jars})
    assert {"pkg:pypi/pyspark@4.2.0", "pkg:maven/org.apache.kafka/kafka_2.13@4.3.1"} <= set(urls)
    assert all(one["hashes"] for one in document["components"])


def test_the_same_lock_files_give_the_same_bytes_but_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1764500000")
    found = bill_of_materials()
    assert found == bill_of_materials()
    assert json.loads(found)["metadata"]["timestamp"] == "2025-11-30T10:53:20+00:00"


def test_a_package_has_its_version_and_the_hashes_of_its_files() -> None:
    first, second = "a" * 64, "b" * 64
    text = (
        f"Some.Name[crc32c]==1.2.3rc1 ; python_version < '3.12' \\\n    --hash=sha256:{first} \\\n"
        f"    --hash=sha256:{second}\n    # via other\nother==2 \\\n    --hash=sha256:{first}\n"
    )
    one, other = locked_packages(text)
    assert (str(one.purl), {found.content for found in one.hashes}) == (
        "pkg:pypi/some.name@1.2.3rc1",
        {first, second},
    )
    assert (other.name, other.version, len(other.hashes)) == ("other", "2", 1)


@pytest.mark.parametrize("before", ["\t", "......\t", "other#1;2 in public"])
def test_a_jar_is_named_as_its_repository_names_it_wherever_in_the_log_of_two_ivys(
    tmp_path: Path, before: str
) -> None:
    (tmp_path / "spark").mkdir()
    (tmp_path / "spark" / "one-1.0.jar").write_bytes(b"jar")
    (tmp_path / "fetch.log").write_text(before + JAR)
    (jar,) = fetched_jars(tmp_path)
    assert str(jar.purl) == "pkg:maven/org.example/one@1.0"
    assert [one.content for one in jar.hashes] == [hashlib.sha256(b"jar").hexdigest()]


@pytest.mark.parametrize(
    ("log", "jar", "said"),
    [(JAR, "two-1.0.jar", "two-1.0.jar"), (JAR, None, "no jars"), (None, "one-1.0.jar", "one-1.0.jar")],
)
def test_jars_that_cannot_be_named_are_an_error(
    tmp_path: Path, log: str | None, jar: str | None, said: str
) -> None:
    if log is not None:
        (tmp_path / "fetch.log").write_text(log)
    if jar is not None:
        (tmp_path / "spark").mkdir()
        (tmp_path / "spark" / jar).touch()
    with pytest.raises(TrunklineError, match=re.escape(said)):
        list(fetched_jars(tmp_path))
