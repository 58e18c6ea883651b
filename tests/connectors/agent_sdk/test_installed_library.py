"""The installed library on machines without this checkout, with each Python from 3.11 to 3.13 that is here."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.cli.stack.build_command import build_agent
from tests.agent_hosts import MINORS, AgentHost, make_host, pythons
from trunkline_agent.extras import EXTRAS, MissingExtra, require_extra

VERSIONS = sorted(pythons())
MAKE_HOST_S = 120

IMPORT_ALL = """\
import importlib, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
        found[name] = None
    except ImportError as error:
        found[name] = [type(error).__name__, getattr(error, "extra", None), str(error)]
known = {*sys.stdlib_module_names, "__main__", "trunkline_agent", "h11"}
print(json.dumps({"found": found, "others": sorted({name.split(".")[0] for name in sys.modules} - known)}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return Path(build_agent(tmp_path_factory.mktemp("dist"))[0].path)


@pytest.fixture(scope="module")
def host(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AgentHost]:
    """Gives the host with a Python of this machine and with extras; each is made once."""
    folder, made = tmp_path_factory.mktemp("hosts"), {}

    def host_of(version: str, *extras: str) -> AgentHost:
        if (version, extras) not in made:
            name = "-".join((version, *extras))
            made[version, extras] = make_host(pythons()[version], folder / name, wheel, extras)
        return made[version, extras]

    return host_of


def modules(wheel: Path) -> list[str]:
    """The modules of a wheel by dotted name, without programs (`__main__`)."""
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    parts = [name.parent.parts if name.stem == "__init__" else name.with_suffix("").parts for name in names]
    return sorted(".".join(one) for one in parts if one[-1] != "__main__")


def test_the_python_of_the_tests_is_one_of_the_pythons() -> None:
    assert f"3.{sys.version_info.minor}" in pythons()
    assert {int(version.partition(".")[2]) for version in pythons()} <= set(MINORS)


@pytest.mark.requirement("AG-42")
@pytest.mark.timeout(MAKE_HOST_S)
@pytest.mark.parametrize("version", VERSIONS)
def test_with_h11_alone_all_modules_are_importable_or_name_their_extra(
    version: str, wheel: Path, host: Callable[..., AgentHost]
) -> None:
    done = host(version).run(IMPORT_ALL, json.dumps(modules(wheel)))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["others"] == []
    for name, failure in seen["found"].items():
        extra = name.split(".")[1] if name.count(".") and name.split(".")[1] in EXTRAS else None
        if extra is None:
            assert failure is None, f"{name}: {failure}"
        else:
            assert failure is not None, f"{name} needs no extra"
            assert failure[:2] == ["MissingExtra", extra], f"{name}: {failure}"
            assert f"pip install 'trunkline-agent[{extra}]'" in failure[2]


@pytest.mark.requirement("AG-42")
def test_a_missing_extra_is_an_import_error_that_names_what_to_install(host: Callable[..., AgentHost]) -> None:
    code = "from trunkline_agent.extras import require_extra\n"
    done = host(VERSIONS[0]).run(f"{code}require_extra('mcp')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "trunkline_agent.extras.MissingExtra: trunkline_agent.mcp needs cryptography, httpx2, mcp, not "
        "installed here. Install the extra 'mcp': pip install 'trunkline-agent[mcp]'"
    )
    done = host(VERSIONS[0], "mqtt").run(f"{code}require_extra('mqtt')")
    assert (done.returncode, done.stderr) == (0, "")
    for extra in EXTRAS:
        require_extra(extra)  # the product has them all
    assert issubclass(MissingExtra, ImportError)
