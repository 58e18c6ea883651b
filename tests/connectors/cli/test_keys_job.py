"""`trunkline keys rotate job` as a user runs it, against a real gateway and a real broker."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.tools.job_tools.job_files import kept_secrets, secret_path
from schemas.settings.settings import Settings
from tests.connectors.cli.conftest import CommandLine, json_of
from trunkline_agent.jobs.job import Job
from trunkline_agent.wire.mqtt_password import job_user

pytestmark = pytest.mark.requirement("CM-05")


def _registered(trunkline: CommandLine, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = trunkline.json("jobs", "register", "--description", "x", *arguments)
    return found


def test_a_rotation_prints_the_new_secret_once_and_keeps_it_beside_the_old_one_for_the_overlap(
    hub: GatewayClient, trunkline: CommandLine, hub_settings: Settings
) -> None:
    job = _registered(trunkline)
    job_id = job["job_id"]
    told = json_of(trunkline.run("keys", "rotate", "job", job_id, "--overlap", "10m", "--json"))
    assert told["secret"] != job["secret"] and told["mqtt_user"] == job_user(job_id, told["secret"])
    kept = kept_secrets(hub_settings, job_id)
    assert kept is not None and (kept.secret, kept.former) == (told["secret"], job["secret"])
    assert 590 < kept.former_ends_at - time.time() <= 601
    folder = secret_path(hub_settings, job_id).parent
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    row = hub.get(path_of("jobs", job_id))
    assert (row["secret_rotations"], row["old_secret_ends_at"]) == (1, told["old_secret_ends_at"])
    shown = trunkline.call("jobs", "show", job_id)
    assert "secret_rotations" in shown.stdout and told["secret"] not in shown.stdout


def test_the_same_request_is_the_same_rotation_also_for_a_file_that_was_not_written(
    hub: GatewayClient, trunkline: CommandLine, hub_settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "job.secret"
    job_id = _registered(trunkline, "--secret-file", str(file))["job_id"]
    first = file.read_text()
    rotate = ("keys", "rotate", "job", job_id, "--secret-file", str(file), "--request-id", "r-1")
    done = trunkline.call(*rotate)
    second = file.read_text()
    assert done.returncode == 0 and second != first and second.strip() not in done.stdout
    file.unlink()
    again = trunkline.json(*rotate)
    assert (file.read_text(), again["request_id"], again.get("secret")) == (second, "r-1", None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert hub.get(path_of("jobs", job_id))["secret_rotations"] == 1
    assert not secret_path(hub_settings, job_id).exists()
    picked = trunkline.json("jobs", "pick", "--session", "s")
    assert picked["secret"] == second.strip()


def test_both_secrets_publish_during_the_overlap_and_the_receipts_say_so(
    hub: GatewayClient, trunkline: CommandLine, hub_settings: Settings, start_bridge: Any, tmp_path: Path
) -> None:
    start_bridge(hub_settings)
    job = _registered(trunkline)
    told = trunkline.json("keys", "rotate", "job", job["job_id"])
    for secret, event in ((job["secret"], "started"), (told["secret"], "progress")):
        publisher = Job(job["job_id"], secret, mqtt=hub_settings.mqtt, state_dir=tmp_path / "state")
        assert publisher.publish(event, "x").verdict == "accepted"
    own = trunkline.call("publish", "--job", job["job_id"], "--event", "completed", "--json", "--state-dir",
                         str(tmp_path / "state"))  # fmt: skip
    assert json_of(own)["verdict"] == "accepted"


def test_what_cannot_be_rotated_is_refused_with_its_exit_code(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    job_id = _registered(trunkline)["job_id"]
    for code, arguments in (
        (2, ("NOT-A-JOB",)),
        (2, (job_id, "--overlap", "soon")),
        (2, (job_id, "--overlap", "1000h")),
        (2, (job_id, "--secret-file", str(tmp_path / "nowhere" / "file"))),
        (3, ("00000000",)),
    ):
        done = trunkline.call("keys", "rotate", "job", *arguments)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
    hub.post(path_of("jobs", job_id, "cancel"), {})
    ended = trunkline.call("keys", "rotate", "job", job_id)
    assert ended.returncode == 4 and "after_terminal" in ended.stderr
