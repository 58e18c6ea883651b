"""`trunkline publish` as a user runs it.

`trunkline jobs` has its tests in cli/test_jobs.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.programs.local_stack import free_port
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import program_environment, wait_until, with_mqtt
from tests.forked_programs import forked_command
from tests.programs import run_program

JOB = "0a1b2c3d"
SECRET = "canary-77aa10c4-secret"


def _run(settings, *arguments, stdin=None, **environment):
    return run_program(
        [*forked_command("connectors.cli"), *arguments],
        env=program_environment(settings) | environment,
        input=stdin,
    )


@pytest.mark.requirement("JE-17")
def test_publish_says_where_the_event_lies(backbone_settings, start_bridge, tmp_path, read_topic):
    start_bridge()
    shared = ("publish", "--job", JOB, "--state-dir", str(tmp_path / "state"))
    environment = {"TRUNKLINE_JOB_SECRET": SECRET}
    done = _run(backbone_settings, *shared, "--event", "started", "--detail", "begins", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    (record,) = read_topic(1)
    assert f"partition {record.partition}, offset {record.offset}" in done.stdout
    more = ("--event", "progress", "--data", "-", "--json")
    done = _run(backbone_settings, *shared, *more, stdin='{"done": 3}', **environment)
    told = json.loads(done.stdout)
    assert (told["seq"], told["verdict"]) == (2, None)
    assert json.loads(read_topic(2)[1].value)["data"]["done"] == 3
    assert SECRET not in done.stdout


@pytest.mark.requirement("CM-05")
def test_the_job_secret_is_in_no_message_and_no_process_list(backbone_settings, tmp_path):
    away = with_mqtt(backbone_settings, port=free_port(), publish_attempts=8, backoff_base_s=0.4)
    file = tmp_path / "job.secret"
    file.touch(0o600)
    file.write_text(SECRET)
    arguments = ["publish", "--job", JOB, "--event", "progress", "--secret-file", str(file)]
    child = subprocess.Popen(
        [sys.executable, "-m", "connectors.cli", *arguments],
        cwd=PROJECT_ROOT,
        env=program_environment(away),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    state = Path(away.data_dir) / "publisher" / f"{JOB}.json"
    wait_until(state.exists, what="the publisher at work")
    for name in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{child.pid}/{name}").read_bytes()
    out, err = child.communicate(timeout=60)
    assert child.returncode == 5
    assert SECRET.encode() not in out + err + state.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "secret", "said"),
    [
        (("--event", "progress"), "", "set TRUNKLINE_JOB_SECRET"),
        ((), SECRET, "give --event"),
        (("--event", "progress", "--resend"), SECRET, "give --event"),
        (("--event", "progress", "--data", "{"), SECRET, "--data: not JSON at character"),
        (("--event", "progress", "--data", "[1]"), SECRET, "expected a JSON object"),
        (("--event", "progress", "--detail", "in /etc/x"), SECRET, "posix_path"),
        (("--event", "nonsense"), SECRET, "invalid choice"),
    ],
)
def test_a_wrong_call_is_exit_code_2_and_says_what_is_wrong(backbone_settings, arguments, secret, said):
    shared = ("publish", "--job", JOB)
    done = _run(backbone_settings, *shared, *arguments, TRUNKLINE_JOB_SECRET=secret)
    assert done.returncode == 2
    assert said in done.stderr
    assert SECRET not in done.stderr


def test_a_secret_file_that_others_can_read_is_refused(backbone_settings, tmp_path):
    file = tmp_path / "job.secret"
    file.write_text(SECRET)
    file.chmod(0o644)
    arguments = ("publish", "--job", JOB, "--event", "progress", "--secret-file", str(file))
    done = _run(backbone_settings, *arguments)
    assert done.returncode == 2
    assert "chmod 600" in done.stderr


@pytest.mark.requirement("JE-15")
def test_publish_makes_as_many_attempts_as_it_is_told(backbone_settings):
    away = with_mqtt(backbone_settings, port=free_port(), backoff_base_s=0.01)
    shared = ("publish", "--job", JOB, "--event", "progress")
    for attempts, said in ((None, "(3 attempts)"), ("1", "(1 attempt)"), ("5", "(5 attempts)")):
        arguments = shared if attempts is None else (*shared, "--attempts", attempts)
        done = _run(away, *arguments, TRUNKLINE_JOB_SECRET=SECRET)
        assert (done.returncode, said in done.stderr) == (5, True), done.stderr
    for wrong in ("0", "-1", "x", "101"):
        done = _run(away, *shared, "--attempts", wrong, TRUNKLINE_JOB_SECRET=SECRET)
        assert (done.returncode, "--attempts" in done.stderr) == (2, True), done.stderr
