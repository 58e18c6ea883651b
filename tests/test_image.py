"""The image, built by the steps of its Dockerfile, and a stack of its containers as uid 123456.

The base is made by debootstrap, of this machine's own release and from its own package sources; with
TRUNKLINE_TEST_IMAGE_BASE it is that image. Takes a quarter of an hour, 10 GB, root, and Debian or Ubuntu.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.programs.local_stack.part_plan import ALL_PARTS
from schemas.settings.settings import PROJECT_ROOT, settings_environment
from tests.broker_processes import wait_until
from tests.odd_places import GID, UID
from tests.own_settings import stack_settings
from tests.programs import required_program, run_program

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.requirement("DP-05")]

NAME = "localhost/trunkline-test"
BUILD_S, READY_S, END_S, COMMAND_S = 1800, 240, 90, 120
# Where this machine gets packages from, and whom it trusts.
OF_THIS_MACHINE = (
    "etc/pip.conf",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "usr/local/share/ca-certificates",
)
BUILD_VARIABLES = ("PIP_INDEX_URL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "JAVA_TOOL_OPTIONS")


class Builder:
    """Runs buildah with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        store = ("--storage-driver=vfs", f"--root={folder / 'store'}", f"--runroot={folder / 'run'}")
        self._command = (required_program("buildah", "buildah"), *store)

    def __call__(self, *arguments: str) -> str:
        """Run a command of buildah to its end, and return what it printed."""
        done = run_program([*self._command, *arguments], timeout_s=BUILD_S)
        assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def make_base(self) -> str:
        """Make an image of this machine's release, and return its name."""
        root = self.folder / "root"
        release = platform.freedesktop_os_release()["VERSION_CODENAME"]
        debootstrap = required_program("debootstrap", "debootstrap")
        done = run_program(
            [debootstrap, "--variant=minbase", "--include=ca-certificates", release, root], timeout_s=BUILD_S
        )
        assert done.returncode == 0, done.stdout[-2000:]
        for one in OF_THIS_MACHINE:
            source, target = Path("/") / one, root / one
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            elif source.is_file():
                shutil.copy(source, target)
        run_program(["chroot", root, "update-ca-certificates"]).check_returncode()
        container = self("from", "scratch")
        self("add", "--quiet", container, str(root), "/")
        self("commit", "--quiet", "--rm", container, f"{NAME}-base")
        shutil.rmtree(root)
        return f"{NAME}-base"


class Image:
    """A mounted image with its configuration, and the folder that its containers share."""

    def __init__(self, root: Path, config: dict[str, Any], data: Path) -> None:
        self.root = root
        self.config = config
        self.data = data
        self.ports = settings_environment(stack_settings(Path("/data/trunkline")))

    def command(self, part: str, words: Sequence[str]) -> list[str]:
        """The command of a part's container: no root, nothing to write but /data and /tmp."""
        variables = (
            dict(one.split("=", 1) for one in self.config["Env"]) | self.ports | {"TRUNKLINE_PART": part}
        )
        if part in ("bridge", "gateway"):
            variables["TRUNKLINE__MQTT__ACCOUNTS_DIR"] = "/data/trunkline/mosquitto/accounts"
        named = [word for name, value in variables.items() for word in ("--setenv", name, value)]
        return [
            *("setpriv", "--reuid", str(UID), "--regid", str(GID), "--clear-groups", "--no-new-privs"),
            *(required_program("bubblewrap", "bwrap"), "--die-with-parent", "--clearenv", *named),
            *("--ro-bind", str(self.root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),  # noqa: S108
            *("--bind", str(self.data), "/data", "--chdir", "/", "--", *words),
        ]

    def healthy(self, part: str) -> bool:
        """Return if the health check of a part's container succeeds."""
        kind, *words = self.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return subprocess.run(self.command(part, words), timeout=COMMAND_S).returncode == 0

    def trunkline(self, *arguments: str) -> str:
        """The output of a command of the image, beside the gateway."""
        command = self.command("gateway", [*self.config["Entrypoint"], *arguments])
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def container(self, part: str, log: Path) -> Iterator[None]:
        """A healthy container of a part, which ends well on a signal."""
        words = [*self.config["Entrypoint"], *self.config["Cmd"]]
        with log.open("wb") as output:
            process = subprocess.Popen(self.command(part, words), stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: process.poll() is not None or self.healthy(part), READY_S, f"{part} is healthy")
            assert process.poll() is None, log.read_text()[-3000:]
            yield
            # As to a container's first process; bubblewrap hands no signal on, and ends as its child does.
            (first,) = psutil.Process(process.pid).children()
            first.terminate()
            assert process.wait(END_S) == 0, log.read_text()[-3000:]
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def image() -> Iterator[Image]:
    """The image, new from this checkout."""
    with tempfile.TemporaryDirectory(prefix="trunkline-image-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        data = folder / "data"
        data.mkdir(0o700)
        os.chown(data, UID, GID)
        builder = Builder(folder)
        base = os.environ.get("TRUNKLINE_TEST_IMAGE_BASE") or builder.make_base()
        variables = [f"--env={name}" for name in BUILD_VARIABLES if name in os.environ]
        builder(
            *("bud", "--format=docker", "--isolation=chroot", f"--build-arg=BASE={base}", *variables),
            *(f"--tag={NAME}", str(PROJECT_ROOT)),
        )
        config = json.loads(builder("inspect", "--type=image", NAME))["Docker"]["config"]
        root = Path(builder("mount", builder("from", NAME)))
        for above in root.parents:
            if above.is_relative_to(folder):
                above.chmod(0o711)
        yield Image(root, config, data)
        builder("umount", "--all")


@pytest.mark.timeout(BUILD_S + len(ALL_PARTS) * READY_S)
def test_a_stack_of_containers_works_as_any_user_on_a_read_only_file_system(
    image: Image, tmp_path: Path
) -> None:
    logs = {part: tmp_path / f"{part}.log" for part in ALL_PARTS}
    with ExitStack() as opened:
        for part, log in logs.items():
            opened.enter_context(image.container(part, log))
        image.trunkline("principals", "add", "reader", "--role", "worker")
        image.trunkline("messages", "send", "reader", "note", "--text", "hello")
        assert "note" in image.trunkline("messages", "peek", "reader")
        image.trunkline("doctor")
    for part, log in logs.items():
        for line in log.read_text().splitlines():
            assert isinstance(json.loads(line), dict), f"{part}: {line}"
    assert {path.stat().st_uid for path in image.data.rglob("*")} == {UID}
