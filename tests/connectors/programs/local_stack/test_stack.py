"""The stack in this process: real brokers start, die, come back and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from connectors.programs.local_stack import ALL_PARTS, LocalStack, PartFailed, free_port
from connectors.programs.local_stack.mosquitto_plan import mosquitto_plan
from connectors.programs.local_stack.part import Part, child_environment
from connectors.programs.local_stack.part_plan import STOP_ORDER
from connectors.programs.local_stack.ports import kafka_answers, mqtt_answers
from connectors.programs.local_stack.program_plans import streams_plan
from connectors.programs.local_stack.stack import PLANS
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import KafkaSettings, Settings, SparkSettings
from tests.broker_processes import wait_until
from tests.connectors.programs.local_stack.conftest import still_running
from trunkline_agent.errors import TrunklineError, UsageError

pytestmark = pytest.mark.stack

BROKERS = ("kafka", "mosquitto")


def kafka_address(settings: Settings) -> tuple[str, int]:
    host, _, port = settings.kafka.bootstrap_servers.rpartition(":")
    return host, int(port)


def test_a_stack_is_ready_when_start_returns_and_nothing_is_left_after_stop(stack_settings: Settings):
    with LocalStack(stack_settings, BROKERS) as stack:
        assert kafka_answers(*kafka_address(stack_settings))
        assert mqtt_answers("127.0.0.1", stack_settings.mqtt.port)
        check_topic(stack_settings)
        assert all(part.pid for part in stack.parts.values())
    assert still_running(stack_settings) == []
    assert not kafka_answers(*kafka_address(stack_settings))


def test_a_killed_broker_starts_again_with_its_data(stack_settings: Settings):
    with LocalStack(stack_settings, ("kafka",)) as stack:
        before = stack["kafka"].pid
        stack["kafka"].kill()
        assert stack["kafka"].pid is None
        stack["kafka"].start()
        assert stack["kafka"].pid not in (None, before)
        check_topic(stack_settings)


def test_two_stacks_at_once_do_not_meet(stack_settings: Settings, other_settings: Settings):
    with (
        LocalStack(stack_settings, ("mosquitto",)) as first,
        LocalStack(other_settings, ("mosquitto",)) as second,
    ):
        first["mosquitto"].kill()
        assert mqtt_answers("127.0.0.1", other_settings.mqtt.port)
        assert second["mosquitto"].pid is not None


def test_a_second_stack_on_the_same_data_is_refused(stack_settings: Settings):
    with (
        LocalStack(stack_settings, ("mosquitto",)) as first,
        pytest.raises(TrunklineError, match="already runs with data_dir"),
    ):
        LocalStack(stack_settings, ("mosquitto",)).start()
    assert first["mosquitto"].pid is None


def test_a_taken_port_is_named_with_its_setting(stack_settings: Settings):
    with (
        socket.create_server(("127.0.0.1", stack_settings.mqtt.port)),
        pytest.raises(
            TrunklineError, match=rf"port {stack_settings.mqtt.port} \(setting mqtt.port\) is taken by"
        ),
    ):
        LocalStack(stack_settings, ("mosquitto",)).start()
    assert still_running(stack_settings) == []


def test_a_part_that_ends_at_its_start_is_an_error_that_quotes_its_log(stack_settings: Settings):
    program = "import sys; print('the disk is full'); sys.exit(3)"
    plan = replace(mosquitto_plan(stack_settings), command=lambda: [sys.executable, "-c", program])
    with pytest.raises(
        PartFailed, match=r"(?s)exit code 3 before it was ready.*mosquitto\.log.*the disk is full"
    ):
        Part(plan, stack_settings).start()


def test_a_broker_elsewhere_is_not_started_here(stack_settings: Settings):
    elsewhere = stack_settings.model_copy(
        update={"kafka": KafkaSettings(bootstrap_servers="kafka.example:9092")}
    )
    with pytest.raises(UsageError, match=r"kafka\.bootstrap_servers is 'kafka\.example:9092'"):
        LocalStack(elsewhere, ("kafka",))


def test_a_part_that_does_not_exist_is_named(stack_settings: Settings):
    with pytest.raises(UsageError, match="no such part: zookeeper"):
        LocalStack(stack_settings, ("zookeeper",))


def test_every_part_has_a_plan_and_free_ports_differ():
    assert tuple(PLANS) == ALL_PARTS
    assert sorted(STOP_ORDER) == sorted(ALL_PARTS)
    assert len({free_port() for _ in range(20)}) == 20


@pytest.mark.requirement("CM-05")
def test_the_callers_token_and_job_secret_do_not_reach_the_parts(
    stack_settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRUNKLINE_TOKEN", "a viewer's")
    monkeypatch.setenv("TRUNKLINE_JOB_SECRET", "a job's")
    assert not {"TRUNKLINE_TOKEN", "TRUNKLINE_JOB_SECRET"} & child_environment(stack_settings).keys()


def test_a_prefix_that_could_write_its_own_line_into_the_acl_is_refused(stack_settings: Settings):
    forged = stack_settings.mqtt.model_copy(update={"topic_prefix": "a\nuser bo\ntopic b"})
    settings = stack_settings.model_copy(update={"mqtt": forged})
    with pytest.raises(UsageError, match=r"mqtt\.topic_prefix has a control character"):
        LocalStack(settings, ("mosquitto",)).start()


def test_the_data_of_a_stack_is_below_its_data_directory(stack_settings: Settings, tmp_path: Path):
    with LocalStack(stack_settings, ("mosquitto",)) as stack:
        assert stack["mosquitto"].log_path == tmp_path / "data" / "logs" / "mosquitto.log"
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"keys", "logs", "mosquitto", "run"}


# Two threads and a child process, made before the niceness is set; after that, on a signal, one more of each.
FAMILY = """
import os, signal, subprocess, sys, threading
from pathlib import Path

def say(who):
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    print(who, own, flush=True)

wait = "import signal; signal.pause()"
child = subprocess.Popen([sys.executable, "-c", wait])
threading.Thread(target=threading.Event().wait, daemon=True).start()
say("first")
signal.sigwait({signal.SIGUSR1})
late = threading.Thread(target=say, args=("thread",))
late.start()
late.join()
subprocess.run([sys.executable, "-c", "import os; print('process', os.getpriority(os.PRIO_PROCESS, 0))"])
os.write(1, b"pid %d\\n" % child.pid)  # in one piece, which an unbuffered print is not
signal.pause()
"""


@pytest.mark.requirement("OP-01")
def test_a_part_starts_at_full_priority_and_lowers_all_its_threads_and_processes_once_it_is_ready(
    stack_settings: Settings, tmp_path: Path
):
    ready = tmp_path / "ready"
    plan = replace(
        mosquitto_plan(stack_settings),
        command=lambda: [sys.executable, "-c", f"import signal\nsignal.pthread_sigmask(0, [10])\n{FAMILY}"],
        prepare=lambda: None,
        is_ready=ready.exists,
        niceness=7,
    )
    part = Part(plan, stack_settings)
    try:
        part.launch()
        wait_until(lambda: "first" in part.log_path.read_text(), what="it says its priority")
        assert part.pid is not None and not part.check_ready()
        ready.touch()
        assert part.check_ready()
        os.kill(part.pid, signal.SIGUSR1)
        wait_until(lambda: "pid" in part.log_path.read_text(), what="it says its later priority")
        first, thread, process, child = part.log_path.read_text().splitlines()
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        lower = min(19, ours + 7)
        assert (first, thread, process) == (f"first {ours}", f"thread {lower}", f"process {lower}")
        threads = [int(thread.name) for thread in Path(f"/proc/{part.pid}/task").iterdir()]
        assert len(threads) == 2
        own = [*threads, int(child.partition(" ")[2])]
        assert {os.getpriority(os.PRIO_PROCESS, one) for one in own} == {lower}
        session = Path(f"/proc/{part.pid}/autogroup")
        # Linux schedules sessions against each other where it has this file: the value of the process alone
        # would change nothing for the other parts.
        assert not session.exists() or session.read_text().endswith("nice 7\n")
    finally:
        part.kill()


# A process with a thread whose name the system knows.
NAMED_THREAD = """
import ctypes, signal, threading
def quiet():
    ctypes.CDLL(None).prctl(15, b"quiet one", 0, 0, 0)
    print("named", flush=True)
    threading.Event().wait()
threading.Thread(target=quiet, daemon=True).start()
signal.pause()
"""


@pytest.mark.requirement("ST-93")
def test_threads_of_a_part_that_shall_be_idle_get_only_what_its_others_leave_once_it_is_ready(
    stack_settings: Settings, tmp_path: Path
):
    ready = tmp_path / "ready"
    plan = replace(
        mosquitto_plan(stack_settings),
        command=lambda: [sys.executable, "-c", NAMED_THREAD],
        prepare=lambda: None,
        is_ready=ready.exists,
        idle_threads="quiet",
    )
    part = Part(plan, stack_settings)
    try:
        part.launch()
        wait_until(lambda: "named" in part.log_path.read_text(), what="the thread's name")
        ready.touch()
        assert part.check_ready()
        tasks = Path(f"/proc/{part.pid}/task").iterdir()
        nice = {
            (one / "comm").read_text().strip(): os.getpriority(os.PRIO_PROCESS, int(one.name)) for one in tasks
        }
        assert nice.pop("quiet one") == 19
        assert set(nice.values()) == {os.getpriority(os.PRIO_PROCESS, 0)}
    finally:
        part.kill()


def test_only_spark_leaves_the_processor_to_others(stack_settings: Settings):
    settings = stack_settings.model_copy(update={"spark": SparkSettings()})
    nice = {name: plan(settings).niceness for name, plan in PLANS.items()}
    assert {name: value for name, value in nice.items() if value} == {"streams": 10}


@pytest.mark.requirement("ST-93")
def test_the_second_compiler_of_kafka_is_idle(stack_settings: Settings):
    plan = PLANS["kafka"](stack_settings)
    assert plan.idle_threads == "C2 Comp"
    assert not any("TieredStopAtLevel" in one for one in plan.command())


# A process with two children, as spark-submit has them: one that has ended and was not waited for, and the job.
JVM = """
import subprocess, sys
ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
ended.stdout.read()
wait = "import signal, sys; print(flush=True); signal.pause()"
job = subprocess.Popen([sys.executable, "-c", wait, "jobs/run_streams.py"], stdout=subprocess.PIPE)
job.stdout.readline()
print(job.pid, flush=True)
sys.exit(-job.wait())
"""


def test_the_streams_are_asked_to_end_also_when_a_process_beside_them_has_just_ended(stack_settings: Settings):
    with subprocess.Popen([sys.executable, "-c", JVM], stdout=subprocess.PIPE, text=True) as jvm:
        assert jvm.stdout is not None
        job = psutil.Process(int(jvm.stdout.readline()))
        try:
            streams_plan(stack_settings).terminate(jvm.pid)
            assert jvm.wait(20) == signal.SIGTERM, "the job ended by it, and nobody else was asked"
        finally:
            with suppress(psutil.NoSuchProcess):
                job.kill()
