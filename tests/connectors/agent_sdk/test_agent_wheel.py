"""The build of the agents' library: the bytes and the files of the wheel and the sdist."""

from __future__ import annotations

import ast
import email
import json
import os
import shutil
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from connectors.cli.stack.build_command import AGENT_PROJECT, build_agent
from schemas.settings.settings import PROJECT_ROOT
from tests.forked_programs import forked_command
from tests.programs import required_program, run_program
from tests.source_files import project_files
from trunkline_agent.errors import TrunklineError, UsageError
from trunkline_agent.extras import EXTRAS
from trunkline_agent.version import __version__

PACKAGE = "trunkline_agent"
FIXED_TIME = (2020, 2, 2, 0, 0, 0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, as the command makes them."""
    out = tmp_path_factory.mktemp("dist")
    command = [*forked_command("connectors.cli"), "build", "agent", "--json", "--out", str(out)]
    done = run_program(command, env={**os.environ, "TRUNKLINE_CONF": os.devnull})
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["built"]
    assert {Path(one["path"]).name: one["bytes"] for one in made} == {
        p.name: len(read(p)) for p in out.iterdir()
    }
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """The wheel."""
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    """The sdist."""
    (found,) = built.glob("*.tar.gz")
    return found


def read(path: Path) -> bytes:
    """The bytes of a file."""
    return path.read_bytes()


def copied(folder: Path) -> Path:
    """A copy of the project with other times and modes, made in another order, and with an editor's files."""
    folder.mkdir()
    for file in reversed(
        [path for path in project_files() if path.is_relative_to(AGENT_PROJECT.relative_to(PROJECT_ROOT))]
    ):
        target = folder / (PROJECT_ROOT / file).relative_to(AGENT_PROJECT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PROJECT_ROOT / file, target)
        target.chmod(0o600)
        os.utime(target, (1_000_000_000, 1_000_000_000))
    for left in ("notes.txt", "agent.py~", "__pycache__/x.cpython-311.pyc", ".agent.py.swp"):
        (folder / PACKAGE / left).parent.mkdir(exist_ok=True)
        (folder / PACKAGE / left).write_text("left behind")
    return folder


@pytest.mark.long
@pytest.mark.requirement("AG-40")
def test_a_build_of_a_copy_with_other_times_modes_and_stray_files_has_the_same_bytes(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SOURCE_DATE_EPOCH", "1700000000"), ("TZ", "Asia/Tokyo"), ("PYTHONHASHSEED", "7")):
        monkeypatch.setenv(name, value)
    before = os.umask(0o077)
    try:
        again = build_agent(tmp_path / "out", copied(tmp_path / "copy"))
    finally:
        os.umask(before)
    assert {Path(one.path).name for one in again} == {path.name for path in built.iterdir()}
    for one in again:
        assert read(Path(one.path)) == read(built / Path(one.path).name)


@pytest.mark.long
@pytest.mark.requirement("AG-40")
def test_the_wheel_of_the_unpacked_sdist_is_the_wheel_of_the_tree(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (project,) = tmp_path.iterdir()
    for one in build_agent(tmp_path / "out", project):
        assert read(Path(one.path)) == read(wheel.parent / Path(one.path).name)


@pytest.mark.requirement("AG-40")
def test_no_archive_shows_when_where_or_by_whom_it_was_made(wheel: Path, sdist: Path) -> None:
    entries = zipfile.ZipFile(wheel).infolist()
    assert {(entry.date_time, entry.external_attr >> 16 & 0o777) for entry in entries} == {(FIXED_TIME, 0o644)}
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert len({member.mtime for member in members}) == 1
    assert {(m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, "", "", 0o644)}


@pytest.mark.requirement("AG-40")
def test_a_build_that_fails_leaves_the_earlier_files_and_nothing_else(tmp_path: Path) -> None:
    project, out = copied(tmp_path / "copy"), tmp_path / "out"
    out.mkdir()
    (out / "earlier.whl").write_text("earlier")
    (project / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(TrunklineError, match=r"the build of .* failed with 1:\n"):
        build_agent(out, project)
    assert [path.name for path in out.iterdir()] == ["earlier.whl"]


@pytest.mark.requirement("AG-40")
@pytest.mark.parametrize(
    ("out", "js"), [("copy/pyproject.toml", False), ("out", True)], ids=["a file", "no js"]
)
def test_a_build_that_cannot_work_says_which_option_is_wrong(tmp_path: Path, out: str, js: bool) -> None:
    project = copied(tmp_path / "copy")
    shutil.rmtree(project / "js", ignore_errors=True)
    with pytest.raises(UsageError, match="--js" if js else "--out"):
        build_agent(tmp_path / out, project, js=js)


@pytest.mark.requirement("AG-41")
def test_the_wheel_has_one_top_level_name_and_every_module_of_the_package_and_nothing_else(wheel: Path) -> None:
    root = AGENT_PROJECT.relative_to(PROJECT_ROOT)
    tracked = {str(path.relative_to(root)) for path in project_files() if path.is_relative_to(root / PACKAGE)}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == tracked
    assert {name.split("/")[0] for name in packed} == {PACKAGE}
    assert f"{PACKAGE}/py.typed" in packed
    assert [name for name in packed if "test" in Path(name).stem.split("_") or name.endswith(".js")] == []


@pytest.mark.requirement("AG-41")
def test_the_metadata_names_h11_three_extras_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"{PACKAGE}-{__version__}.dist-info"
    metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("trunkline-agent", __version__)
    assert metadata["Requires-Python"] == ">=3.11"
    required: dict[str, set[str]] = {}
    for line in metadata.get_all("Requires-Dist", []):
        name, _, extra = line.partition("; extra == ")
        required.setdefault(extra.strip("'"), set()).add(name.split("<")[0].split(">")[0])
    assert required == {"": {"h11"}, **{extra: set(needs.values()) for extra, needs in EXTRAS.items()}}
    assert archive.read(f"{info}/entry_points.txt").decode().split("\n")[:2] == [
        "[console_scripts]",
        "trunkline-agent = trunkline_agent.command.main:main",
    ]
    assert "with Agent(" in str(metadata.get_payload())


@pytest.mark.requirement("AG-41")
def test_the_version_is_written_in_one_python_file_and_that_of_javascript_equals_it() -> None:
    written = [
        path
        for path in AGENT_PROJECT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert written == [AGENT_PROJECT / PACKAGE / "version.py"]
    project = tomllib.loads((AGENT_PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project
    script = AGENT_PROJECT / "js" / "package.json"
    assert not script.exists() or json.loads(script.read_text())["version"] == __version__


@pytest.mark.node
@pytest.mark.requirement("AG-40")
def test_the_tarball_for_javascript_has_the_same_bytes_each_time_and_needs_npm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    required_program("npm", "npm")
    made = []
    for name in ("one", "two"):
        project = copied(tmp_path / name)
        shutil.rmtree(project / "js", ignore_errors=True)
        (project / "js").mkdir()
        (project / "js" / "package.json").write_text('{"name": "a", "version": "1.2.3", "files": ["a.js"]}')
        (project / "js" / "a.js").write_text("export const a = 1;\n")
        made.append(build_agent(tmp_path / "out" / name, project, js=True))
    assert [Path(one.path).suffix for one in made[0]] == [".whl", ".gz", ".tgz"]
    assert [one.sha256 for one in made[0]] == [one.sha256 for one in made[1]]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TrunklineError, match="npm is not installed"):
        build_agent(tmp_path / "out", project, js=True)
