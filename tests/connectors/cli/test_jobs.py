"""`trunkline jobs` and `trunkline principals` as a user runs them, against a real gateway."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.tools.job_tools.job_files import secret_path
from schemas.keys.sealing import job_secret_purpose
from schemas.settings.settings import Settings
from tests.connectors.cli.conftest import CommandLine, json_of
from trunkline_agent.jobs.job import Job
from trunkline_agent.wire.ids import is_job_id

HOSTILE = "red bidi \u202e zero\u200b"


@pytest.mark.requirement("JE-10")
@pytest.mark.requirement("CM-05")
def test_register_prints_id_and_secret_once_and_keeps_the_secret_for_its_owner_alone(
    hub: GatewayClient, trunkline: CommandLine, hub_settings: Settings, keyring: Any, read_topic: Any
) -> None:
    told = json_of(trunkline.run("jobs", "register", "--description", "build", "--session", "s1", "--json"))
    (record,) = read_topic(1)
    assert told["position"] == [record.partition, record.offset]
    body = json.loads(record.value)
    assert (body["description"], body["session"]) == ("build", "s1")
    assert keyring.open(body["sealed_secret"], job_secret_purpose(told["job_id"])).decode() == told["secret"]
    kept = secret_path(hub_settings, told["job_id"])
    assert told["secret_file"] == str(kept)
    assert kept.read_text().strip() == told["secret"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    shown = trunkline.call("jobs", "show", told["job_id"])
    assert "build" in shown.stdout
    assert told["secret"] not in shown.stdout


@pytest.mark.requirement("JE-10")
@pytest.mark.requirement("CM-05")
def test_register_writes_the_secret_to_a_new_file_and_nowhere_else(
    hub: GatewayClient, trunkline: CommandLine, hub_settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "job.secret"
    arguments = ("jobs", "register", "--description", "x", "--secret-file", str(file))
    done = trunkline.call(*arguments)
    assert done.returncode == 0
    secret = file.read_text().strip()
    assert len(secret) == 43
    assert secret not in done.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = trunkline.call(*arguments)
    assert again.returncode == 2
    assert "not overwritten" in again.stderr
    assert hub.get(path_of("jobs"))["total"] == 1
    assert not (hub_settings.data_path / "job-secrets").exists()
    # A refused registration leaves no file behind.
    bad = tmp_path / "bad.secret"
    done = trunkline.call("jobs", "register", "--description", "bell \a", "--secret-file", str(bad))
    assert done.returncode == 2
    assert not bad.exists()


@pytest.mark.requirement("JE-11")
def test_pick_gives_the_oldest_job_again_to_the_same_session_and_exit_3_to_the_next(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    jobs = [trunkline.json("jobs", "register", "--description", text) for text in ("a", "b")]
    for _ in range(2):
        got = trunkline.json("jobs", "pick", "--session", "s1")
        assert (got["job_id"], got["secret"], got["description"]) == (jobs[0]["job_id"], jobs[0]["secret"], "a")
    assert trunkline.json("jobs", "pick", "--session", "s2")["job_id"] == jobs[1]["job_id"]
    none = trunkline.call("jobs", "pick", "--session", "s3")
    assert (none.returncode, none.stdout) == (3, "")
    assert "no_match" in none.stderr


@pytest.mark.requirement("JE-12")
def test_cancel_says_the_state_and_the_same_request_again_is_the_same_cancellation(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    job = hub.post(path_of("jobs"), {"description": "x"})["job_id"]
    arguments = ("jobs", "cancel", job, "--reason", "not needed", "--request-id", "r-1")
    assert [trunkline.json(*arguments)["verdict"] for _ in range(2)] == ["accepted", "duplicate"]
    other = trunkline.call("jobs", "cancel", job)
    assert other.returncode == 4
    assert "after_terminal" in other.stderr
    assert trunkline.call("jobs", "cancel", "00000000").returncode == 3
    assert trunkline.call("jobs", "cancel", "NOT-A-JOB").returncode == 2


@pytest.mark.requirement("JE-12")
@pytest.mark.requirement("CM-06")
def test_list_filters_and_shows_what_others_wrote_escaped(hub: GatewayClient, trunkline: CommandLine) -> None:
    job = hub.post(path_of("jobs"), {"description": HOSTILE, "session": "s1"})["job_id"]
    hub.post(path_of("jobs"), {"description": "plain"})
    shown = trunkline.call("jobs", "list").stdout
    assert "\\u202e" in shown
    assert "\u202e" not in shown
    assert trunkline.call("jobs", "list", "--json").stdout.isascii()
    assert [j["job_id"] for j in trunkline.json("jobs", "list", "--session", "s1")["jobs"]] == [job]
    assert len(trunkline.json("jobs", "list", "--newer-than", "1h")["jobs"]) == 2
    for nothing in (("--older-than", "1h"), ("--state", "error"), ("--session", "s9")):
        assert trunkline.call("jobs", "list", *nothing).returncode == 3
        assert trunkline.json("jobs", "list", *nothing) == {"jobs": [], "total": 0}
    assert "1 of 2" in trunkline.call("jobs", "list", "--limit", "1").stderr
    assert trunkline.call("jobs", "list", "--newer-than", "soon").returncode == 2


@pytest.mark.requirement("JE-13")
@pytest.mark.requirement("CM-05")
def test_the_brokers_password_comes_from_a_file_that_only_its_owner_reads(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path, read_topic: Any
) -> None:
    file = tmp_path / "broker.json"
    file.write_text('{"host": "broker.example", "port": 8883, "tls": true, "password": "canary-pw"}')
    file.chmod(0o644)
    arguments = ("jobs", "register", "--description", "x", "--broker-file", str(file), "--json")
    refused = trunkline.call(*arguments)
    assert refused.returncode == 2
    assert "chmod 600" in refused.stderr
    file.chmod(0o600)
    json_of(trunkline.call(*arguments))
    (record,) = read_topic(1)
    assert b"canary-pw" not in record.value
    secret = tmp_path / "job.secret"
    picked = trunkline.call("jobs", "pick", "--session", "s1", "--secret-file", str(secret), "--json")
    got = json_of(picked)
    # Output may be logged, so the password is only written to the private file beside the secret.
    assert "canary-pw" not in picked.stdout
    assert got["broker"] == {"host": "broker.example", "port": 8883, "tls": True}
    kept = Path(got["broker_file"])
    assert kept == tmp_path / "job.secret.broker"
    assert json.loads(kept.read_text())["broker"]["password"] == "canary-pw"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.requirement("CM-05")
def test_principals_get_a_token_once_do_what_their_role_may_and_are_revoked(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "ann.token"
    arguments = ("principals", "add", "ann", "--role", "viewer", "--token-file", str(file))
    assert trunkline.json(*arguments) == {"principal": "ann", "role": "viewer", "token_file": str(file)}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    assert trunkline.json("jobs", "list", TRUNKLINE_TOKEN=token)["total"] == 0
    refused = trunkline.call("jobs", "register", "--description", "x", TRUNKLINE_TOKEN=token)
    assert refused.returncode == 4
    assert "policy" in refused.stderr
    assert token not in trunkline.call("principals", "list").stdout
    bo = trunkline.json("principals", "add", "bo", "--role", "delegator")
    job = trunkline.json("jobs", "register", "--description", "x", TRUNKLINE_TOKEN=bo["token"])
    assert is_job_id(job["job_id"])
    assert trunkline.call("principals", "revoke", "ann").returncode == 0
    gone = trunkline.call("jobs", "list", TRUNKLINE_TOKEN=token)
    assert gone.returncode == 4
    assert token not in gone.stderr
    states = {p["principal"]: p["status"] for p in trunkline.json("principals", "list")["principals"]}
    assert states == {"ann": "revoked", "bo": "active"}
    assert trunkline.call("principals", "revoke", "nobody").returncode == 3


def test_publish_finds_the_secret_that_register_kept(
    hub: GatewayClient, trunkline: CommandLine, start_bridge: Any, hub_settings: Settings
) -> None:
    start_bridge(hub_settings)
    job = trunkline.json("jobs", "register", "--description", "x")["job_id"]
    assert trunkline.call("publish", "--job", job, "--event", "started").returncode == 0
    other = hub.post(path_of("jobs"), {"description": "y"})
    missing = trunkline.call("publish", "--job", other["job_id"], "--event", "started")
    assert (missing.returncode, "TRUNKLINE_JOB_SECRET" in missing.stderr) == (2, True)
    Job(
        other["job_id"], other["secret"], mqtt=hub_settings.mqtt, state_dir=hub_settings.data_path / "own"
    ).publish("started", "")


def test_without_a_gateway_the_exit_code_is_5_and_the_message_says_what_to_do(trunkline: CommandLine) -> None:
    for arguments in (
        ("jobs", "list"),
        ("watch", "--all", "--settled"),
        ("monitor", "--once"),
        ("tail", "--live"),
    ):
        done = trunkline.call(*arguments)
        assert (done.returncode, done.stdout) == (5, "")
        assert "trunkline up" in done.stderr
