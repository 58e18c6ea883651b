"""The installed library on machines without this checkout, with each Python from 3.11 to 3.13 that is here."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.cli.stack.build_command import build_agent
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.agent_hosts import MINORS, YARDSTICK, AgentHost, bare, make_host, pythons
from tests.connectors.doors.http_api.hub_access import GatewayProcess, starting
from tests.first_agents import first_round_trips
from tests.network_namespaces import Machine, machine_apart, may_make_namespaces
from trunkline_agent.errors import UsageError
from trunkline_agent.extras import EXTRAS, MissingExtra, require_extra

CORE_BYTES, MQTT_BYTES, IMPORT_RATIO = 10_000_000, 15_000_000, 4
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

USER_PROGRAM = """\
from trunkline_agent import Agent, Credentials
from trunkline_agent.errors import Refused
from trunkline_agent.jobs.job import Job
from trunkline_agent.queue import Queue


def answer(name: str, credentials: Credentials) -> int:
    count = 0
    with Agent(name, credentials) as agent:
        for message in agent.messages(limit=1):
            with message:
                message.reply({"text": message.sender})
                count += 1
    return count


def work(credentials: Credentials) -> int | None:
    with Job("0a1b2c3d", "secret", hub=credentials) as job:
        return job.progress("half done").seq


def is_final(error: Refused) -> bool:
    code: int = error.exit_code
    return code == 4


answer(3, Credentials.load("echo.json"))  # type: ignore[arg-type]
Queue(3.5)  # type: ignore[arg-type]
"""

LOOK = """\
import importlib, json, os, socket, sys
def importable(name):
    try:
        importlib.import_module(name)
        return True
    except ModuleNotFoundError:
        return False
def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
        return True
    except ConnectionRefusedError:
        return False
print(json.dumps({"schemas": importable("schemas"), "connectors": importable("connectors"),
                  "checkout": os.path.exists(sys.argv[1]), "loopback": answers(int(sys.argv[2]))}))
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


def looks(host: AgentHost, machine: Machine, port: int) -> dict[str, bool]:
    """The parts of the product that a program on the machine can reach."""
    command = machine.command([host.python, "-I", "-c", LOOK, PROJECT_ROOT / "pyproject.toml", str(port)])
    done = subprocess.run(command, cwd=host.folder, env=bare(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_python_of_the_tests_is_one_of_the_pythons() -> None:
    assert f"3.{sys.version_info.minor}" in pythons()
    assert {int(version.partition(".")[2]) for version in pythons()} <= set(MINORS)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.requirement("AG-42")
def test_a_missing_extra_is_an_import_error_that_names_what_to_install(host: Callable[..., AgentHost]) -> None:
    code = "from trunkline_agent.extras import require_extra\n"
    done = host(VERSIONS[0]).run(f"{code}require_extra('mcp')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "trunkline_agent.extras.MissingExtra: trunkline_agent.mcp needs cryptography, httpx2, mcp, not "
        "installed here; install the extra 'mcp': pip install 'trunkline-agent[mcp]'"
    )
    done = host(VERSIONS[0], "mqtt").run(f"{code}require_extra('mqtt')")
    assert (done.returncode, done.stderr) == (0, "")
    for extra in EXTRAS:
        require_extra(extra)  # the product has them all
    error = pickle.loads(pickle.dumps(MissingExtra("xml", ["lxml"])))  # noqa: S301  ours
    assert isinstance(error, ImportError) and isinstance(error, UsageError)
    assert (error.extra, error.reason, error.exit_code) == ("xml", "missing_extra", 2)
    assert str(error).startswith("trunkline_agent.xml needs lxml, not installed here; install the extra 'xml'")


@pytest.mark.requirement("AG-42")
def test_the_installed_command_runs_with_h11_alone_and_mcp_names_its_extra(
    host: Callable[..., AgentHost],
) -> None:
    program = host(VERSIONS[0]).folder / "bin" / "trunkline-agent"
    shown = subprocess.run([program, "--help"], env=bare(), capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout.split()[:2]) == (0, ["usage:", "trunkline-agent"]), shown.stderr
    environment = bare() | {
        "AGENT_ID": "echo",
        "AGENT_KEY_PATH": "echo.pem",
        "MCP_SERVER_URL": "http://localhost",
    }
    refused = subprocess.run([program, "mcp"], env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr.endswith("install the extra 'mcp': pip install 'trunkline-agent[mcp]'\n")


@pytest.mark.long
@pytest.mark.requirement("AG-43")
@pytest.mark.timeout(MAKE_HOST_S)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_installed_library_is_small_and_quick_to_import(
    version: str, host: Callable[..., AgentHost], record_property: Callable[[str, object], None]
) -> None:
    core, mqtt = host(version).installed_bytes(), host(version, "mqtt").installed_bytes()
    wall_ms, cpu_ms = host(version).import_ms()
    _, yardstick_ms = host(version).import_ms(code=YARDSTICK)
    print(
        f"Python {version}: {core} bytes, with mqtt {mqtt}; import {wall_ms:.0f} ms, processor {cpu_ms:.0f} ms"
    )
    record_property("bytes", [core, mqtt])
    assert 100_000 < core < mqtt
    assert core <= CORE_BYTES
    assert mqtt <= MQTT_BYTES
    assert cpu_ms <= IMPORT_RATIO * yardstick_ms


@pytest.mark.long
@pytest.mark.requirement("AG-44")
def test_a_typed_program_of_a_user_passes_mypy_strict_against_the_installed_wheel(
    host: Callable[..., AgentHost], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    command = [
        sys.executable,
        "-I",
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        tmp_path / "cache",
    ]
    command += ["--python-executable", host(VERSIONS[0]).python, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=bare(), capture_output=True, text=True, timeout=120)
    # A wrong type that mypy did not see would be an unused `type: ignore`.
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), done.stdout


@pytest.mark.requirement("AG-45")
@pytest.mark.timeout(300)
def test_the_first_agent_answers_from_a_machine_that_has_the_wheel_and_no_checkout(
    backbone_settings: Settings, host: Callable[..., AgentHost], tmp_path: Path
) -> None:
    with starting(GatewayProcess, backbone_settings, tmp_path) as start:
        gateway = start()
        port = gateway.settings.gateway.port
        with machine_apart(port) as machine, gateway.client() as operator:
            assert machine.is_apart == may_make_namespaces()
            for version in VERSIONS:
                looked_at = looks(host(version), machine, port)
                assert looked_at == {
                    "schemas": False,
                    "connectors": False,
                    "checkout": not machine.is_apart,
                    "loopback": not machine.is_apart,
                }
                name = f"echo-{version.replace('.', '-')}"
                seen = first_round_trips(host(version), machine, operator, name, tmp_path / name)
                assert seen.answers == [
                    {"text": f"you wrote {{'text': '{text}'}}"} for text in ("first", "second")
                ]
