"""`Dockerfile` and `compose.yaml` without a builder; `tests/test_image.py` builds the image and runs it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from connectors.programs.local_stack import java_programs
from connectors.programs.local_stack.mosquitto_plan import accounts_dir
from connectors.programs.local_stack.part_plan import ALL_PARTS, BRIDGE, GATEWAY, START_WITHOUT_KAFKA
from schemas.settings.settings import PROJECT_ROOT, load_settings
from tests.programs import run_program

pytestmark = pytest.mark.requirement("DP-05")

DOCKERFILE = (PROJECT_ROOT / "Dockerfile").read_text()
VARIABLES = dict(re.findall(r"(TRUNKLINE\w+)=(\S+)", DOCKERFILE))
SERVICES = yaml.safe_load((PROJECT_ROOT / "compose.yaml").read_text())["services"]


def test_the_compose_file_has_each_part_and_starts_it_after_the_brokers() -> None:
    assert {name: service["environment"]["TRUNKLINE_PART"] for name, service in SERVICES.items()} == {
        name: name for name in ALL_PARTS
    }
    for name, service in SERVICES.items():
        first = () if name in START_WITHOUT_KAFKA else START_WITHOUT_KAFKA
        assert set(service.get("depends_on", ())) == set(first), name


def test_containers_that_need_the_accounts_of_mosquitto_have_their_folder() -> None:
    for name, service in SERVICES.items():
        settings = load_settings({**VARIABLES, **service["environment"]})
        wanted = accounts_dir(settings) if name in (BRIDGE, GATEWAY) else None
        assert settings.mqtt.accounts_dir == wanted, name
        assert any(str(settings.data_path).startswith(one.partition(":")[2]) for one in service["volumes"])


def test_the_image_runs_without_root_and_without_what_a_checkout_has_made() -> None:
    users = re.findall(r"^USER (\d+):", DOCKERFILE, re.MULTILINE)
    assert users and "0" not in users
    left_out = (PROJECT_ROOT / ".dockerignore").read_text().split()
    made = [line.strip("/") for line in (PROJECT_ROOT / ".gitignore").read_text().split() if line[0] == "/"]
    assert set(made) - set(left_out) == set()


def test_the_first_layer_has_the_files_that_find_a_java(tmp_path: Path) -> None:
    first = re.sub(r"\\\n\s*", "", DOCKERFILE).split("\nFROM ")[1]
    for copied in re.findall(r"^COPY (.*)$", first, re.MULTILINE):
        *files, folder = copied.split()
        target = tmp_path / Path(folder).relative_to("/opt/trunkline")
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(PROJECT_ROOT / file, target)
    # As the wrapper calls it, before there is any package.
    program = tmp_path / Path(java_programs.__file__).relative_to(PROJECT_ROOT)
    library = {"PYTHONPATH": str(tmp_path / "connectors" / "agent_sdk"), "PATH": os.environ["PATH"]}
    done = run_program([sys.executable, "-P", "-S", program], cwd=tmp_path, env=library)
    assert Path(done.stdout.strip()).name == "java", done.stderr
