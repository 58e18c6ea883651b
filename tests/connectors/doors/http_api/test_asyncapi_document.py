"""The AsyncAPI document by the parser of AsyncAPI itself (CT-01), and all patterns by JavaScript's own engine.

The parser is the build for browsers in its npm package: one file without dependencies.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from connectors.doors.http_api.contracts.document_routes import ASYNCAPI_FILE
from schemas.settings.settings import PROJECT_ROOT
from tests.programs import required_program, run_program

pytestmark = pytest.mark.requirement("CT-01")

GENERATOR = PROJECT_ROOT / ".ci" / "reference_pages.py"
PARSER = "@asyncapi/parser@3.6.6"
PARSER_SHA512 = "DppE3OStajt6gHc+RsVf9VxRwW9WACagHnFvkOML5rZGwS9hXxtFYTxnsH3mHPRgHom0rClMs6DpbjNY65Y54A=="
PARSER_FILE = "package/browser/index.js"
DOWNLOAD_S = 120
# Prints for each document its faults: severity (0 is an error), code, message and path.
CHECK = """
const { readFileSync } = require("fs");
globalThis.self = globalThis;
require("vm").runInThisContext(readFileSync(process.argv[2], "utf8"));
(async () => {
  const found = [];
  for (const file of process.argv.slice(3)) {
    const faults = await new AsyncAPIParser().validate(readFileSync(file, "utf8"));
    found.push(faults.map((one) => [one.severity, one.code, one.message, one.path.join("/")]));
  }
  console.log(JSON.stringify(found));
})();
"""
# Prints the patterns that are none. `u` is the mode that JSON Schema recommends.
COMPILE = """
const wrong = JSON.parse(process.argv[1]).filter((pattern) => {
  try { new RegExp(pattern, "u"); return false; } catch { return true; }
});
console.log(JSON.stringify(wrong));
"""


@pytest.fixture(scope="module")
def contracts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contracts, as the generator writes them for users."""
    folder = tmp_path_factory.mktemp("contracts")
    done = run_program([sys.executable, str(GENERATOR), "--contracts", str(folder)])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def node() -> str:
    """Node.js."""
    return required_program("nodejs", "node")


@pytest.fixture(scope="module")
def parser(node: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parser's one file, from its npm package."""
    npm, folder = required_program("npm", "npm"), tmp_path_factory.mktemp("parser")
    done = run_program([npm, "pack", "--silent", "--prefer-offline", PARSER], DOWNLOAD_S, cwd=folder)
    assert done.returncode == 0, done.stderr
    (package,) = folder.glob("*.tgz")
    digest = hashlib.sha512(package.read_bytes()).digest()
    assert base64.b64encode(digest).decode() == PARSER_SHA512
    with tarfile.open(package) as archive:
        archive.extract(PARSER_FILE, folder, filter="data")
    return folder / PARSER_FILE


def faults(node: str, parser: Path, *documents: Path) -> list[list[Any]]:
    """The faults that the parser finds in each document."""
    # Not by `--eval`, whose code has a module of its own, to which the parser would add itself.
    program = parser.with_name("check.cjs")
    program.write_text(CHECK, encoding="utf-8")
    done = run_program([node, program, parser, *documents])
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def mqtt_document(contracts: Path) -> dict[str, Any]:
    """The document without the log, which the parser reads quicker."""
    document: dict[str, Any] = json.loads((contracts / ASYNCAPI_FILE).read_bytes())
    del (
        document["channels"]["log"],
        document["operations"]["appendRecord"],
        document["operations"]["foldRecord"],
    )
    for part in ("messages", "schemas"):
        found = document["components"][part]
        document["components"][part] = {
            name: one for name, one in found.items() if name.startswith("mqtt.") or name == "LogPosition"
        }
    return document


def broken_documents(contracts: Path) -> dict[str, dict[str, Any]]:
    """A document with one fault each, by a word that the parser's message has for it; the last has none."""
    found = {word: mqtt_document(contracts) for word in ("does not exist", "action", "job_id", "")}
    found["does not exist"]["channels"]["inbox"]["messages"]["mqtt.inbox_message"]["$ref"] += "x"
    found["action"]["operations"]["receiveJobEvent"]["action"] = "publish"
    del found["job_id"]["channels"]["jobEvents"]["parameters"]["job_id"]
    return found


def test_asyncapis_own_parser_finds_no_fault_in_the_document_and_each_planted_one(
    node: str, parser: Path, contracts: Path, tmp_path: Path
) -> None:
    broken = broken_documents(contracts)
    for number, document in enumerate(broken.values()):
        (tmp_path / f"{number}.json").write_text(json.dumps(document), encoding="utf-8")
    whole, *others, last = faults(node, parser, contracts / ASYNCAPI_FILE, *sorted(tmp_path.glob("*.json")))
    assert (whole, last) == ([], [])
    for word, found in zip(broken, others, strict=False):
        assert [one for one in found if one[0] == 0 and word in one[2]], (word, found)


def patterns_in(part: Any) -> set[str]:
    """All patterns of the schemas in a part of a document."""
    if isinstance(part, list):
        return set().union(*map(patterns_in, part))
    if not isinstance(part, dict):
        return set()
    own = {part["pattern"]} if isinstance(part.get("pattern"), str) else set()
    return own.union(*map(patterns_in, part.values()))


def test_javascript_compiles_every_pattern_of_the_contracts(node: str, contracts: Path) -> None:
    found = patterns_in([json.loads(path.read_bytes()) for path in sorted(contracts.rglob("*.json"))])
    assert len(found) > 10
    wrong = r"^a\z"
    done = run_program([node, "--eval", COMPILE, json.dumps([*sorted(found), wrong])])
    assert json.loads(done.stdout) == [wrong], done.stderr
