"""Builds what is handed on: packages for machines that have no checkout, and the list of what is in Trunkline.

  trunkline build agent                 the library trunkline-agent: wheel and sdist, into dist/
  trunkline build agent --js            and the tarball of the JavaScript library; needs npm
  trunkline build agent --out DIR --json
  trunkline build sbom                  each package and jar, as a CycloneDX document on standard output

The same sources give the same bytes, at any time and in any folder. The document has its own time, which
SOURCE_DATE_EPOCH replaces. Needs no network.

Exit codes: 0; 1 the build failed; 2 wrong arguments.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from connectors.cli.shared.actions import Actions, flag
from connectors.cli.shared.arguments import path
from connectors.cli.shared.call import Call
from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.errors import TrunklineError, UsageError

ACTIONS: Final = Actions()
AGENT_PROJECT: Final = PROJECT_ROOT / "connectors" / "agent_sdk"
_DIST: Final = PROJECT_ROOT / "dist"
_LAST_LINES: Final = 8


@dataclass(frozen=True)
class BuiltFile:
    """A file that a build has made.

    Attributes:
        path: Where it is.
        bytes: Its size.
        sha256: The hash of its content, in hex.
    """

    path: str
    bytes: int
    sha256: str


def build_agent(out: Path, project: Path = AGENT_PROJECT, *, js: bool = False) -> list[BuiltFile]:
    """Build the library for agents into the folder `out`, which is made if it is missing.

    A file of the same name is replaced when all files are built. Nothing is written into the project.

    Args:
        out: The folder for the files.
        project: The folder with the library's `pyproject.toml`, in the checkout or as an unpacked sdist.
        js: Whether to build the tarball of the JavaScript library, too.

    Returns:
        The wheel and the sdist, then the tarball.

    Raises:
        UsageError: The project has no JavaScript library, or the folder `out` cannot be made.
        TrunklineError: The build failed, or npm is missing. The text has the build's last lines.
    """
    if js and not (project / "js" / "package.json").is_file():
        raise UsageError(f"there is no JavaScript library in {project}; leave out --js")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot make the folder {out}: {error.strerror}") from error
    # In the same file system as the folder, so that the files get their names in one step.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=out) as made:
        # Without this variable each file has the time that hatchling gives to all of them.
        environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
        hatchling = [sys.executable, "-I", "-m", "hatchling", "build", "-d", made, "-t", "wheel", "-t", "sdist"]
        _run(hatchling, project, environment)
        files = sorted(Path(made).iterdir(), key=lambda file: file.suffix != ".whl")
        if js:
            files.append(_pack_js(project / "js", Path(made), environment))
        return [_moved(file, out / file.name) for file in files]


def _pack_js(project: Path, made: Path, environment: Mapping[str, str]) -> Path:
    """Return the tarball that npm makes of the JavaScript library."""
    npm = shutil.which("npm")
    if npm is None:
        raise TrunklineError("npm is not installed; --js needs it (Debian: sudo apt-get install -y npm)")
    quiet = {"npm_config_update_notifier": "false", "npm_config_audit": "false", "npm_config_offline": "true"}
    command = [npm, "pack", "--ignore-scripts", "--pack-destination", str(made)]
    _run(command, project, {**environment, **quiet})
    (tarball,) = made.glob("*.tgz")
    return tarball


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a program of the build to its end. Raises TrunklineError with its last lines if it fails."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)  # noqa: S603 ours
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:]
        raise TrunklineError(f"the build of {folder} failed with {done.returncode}:\n" + "\n".join(lines))


def _moved(file: Path, target: Path) -> BuiltFile:
    """Move a file of the build to its place, readable by all, and describe it."""
    file.chmod(0o644)
    file.replace(target)
    content = target.read_bytes()
    return BuiltFile(str(target), len(content), hashlib.sha256(content).hexdigest())


@ACTIONS.add(
    path("--out", "the folder for the files (default: dist in the checkout)", metavar="DIR"),
    flag("--js", "also pack the JavaScript library, with npm"),
    example="trunkline build agent --out release",
)
def _agent(call: Call) -> int:
    """Build the wheel and the sdist of trunkline-agent."""
    built = build_agent((call.out or _DIST).absolute(), js=call.js)
    lines = [f"{one.path}  {one.bytes} bytes  sha256 {one.sha256}" for one in built]
    return call.print_answer({"built": [asdict(one) for one in built]}, *lines)


@ACTIONS.add(
    path("--out", "the file to write (default: standard output)", metavar="FILE"),
    example="trunkline build sbom --out trunkline.cdx.json",
)
def _sbom(call: Call) -> int:
    """List each package of the lock files and each jar, as CycloneDX."""
    from connectors.cli.stack.sbom import bill_of_materials  # needs a library, `--help` must not

    text = bill_of_materials() + "\n"
    if call.out is None:
        print(text, end="")
        return 0
    call.out.write_text(text, encoding="utf-8")
    return call.print_answer({"written": str(call.out.absolute())}, f"{call.out}")
