"""Accounts at the local stack's own Mosquitto: who gets in, who may do what, and how accounts come and go."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from connectors.doors.mqtt_accounts.mosquitto_files import PASSWORDS, line_fits, read_lines
from connectors.doors.mqtt_accounts.mqtt_accounts import MqttAccounts
from connectors.plumbing.mqtt_link.broker_settings import (
    BRIDGE,
    DELEGATOR,
    OPERATOR,
    load_role_passwords,
    role_mqtt,
)
from connectors.programs.local_stack import LocalStack
from schemas.settings.settings import MqttSettings, Settings
from tests.broker_processes import wait_until, with_mqtt
from tests.connectors.folded_jobs import KEYRING, FoldedJobs
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.mqtt_wire import listening, publish_all
from trunkline_agent.broker import job_broker
from trunkline_agent.errors import Refused
from trunkline_agent.jobs.job import Job
from trunkline_agent.mqtt.mqtt_client import LoginAnswer, try_login
from trunkline_agent.wire.mqtt_password import job_user, mqtt_password

pytestmark = pytest.mark.mosquitto

MANY = 1000
EFFECTIVE_S = 20.0
Start = Callable[..., MqttAccounts]


@pytest.fixture(scope="module")
def guarded_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The stack's Mosquitto, with passwords and ACL, for the whole file."""
    with LocalStack(settings_in(tmp_path_factory.mktemp("guarded") / "a folder"), ("mosquitto",)) as stack:
        yield stack


@pytest.fixture
def settings(guarded_stack: LocalStack) -> Settings:
    return with_mqtt(guarded_stack.settings, backoff_base_s=0.3, backoff_max_s=0.3, connect_timeout_s=5)


@pytest.fixture
def jobs() -> FoldedJobs:
    return FoldedJobs()


@pytest.fixture
def start_accounts(settings: Settings, jobs: FoldedJobs) -> Iterator[Start]:
    """Starts the companion on `jobs`; it ends with the test."""
    started: list[MqttAccounts] = []

    def start(**changes: object) -> MqttAccounts:
        accounts = MqttAccounts(with_mqtt(settings, **changes), KEYRING, jobs)
        started.append(accounts)
        jobs.listeners.append(accounts.on_change)
        accounts.open()
        return accounts

    yield start
    for accounts in started:
        accounts.close()


def login(settings: Settings, user: str | None = None, password: str | None = None) -> LoginAnswer:
    return try_login(settings.mqtt, user, password, timeout_s=10)


def job_login(settings: Settings, job_id: str, secret: str) -> LoginAnswer:
    user = job_user(job_id, secret)
    return login(settings, user, mqtt_password(secret, user))


def registered(jobs: FoldedJobs, accounts: MqttAccounts) -> tuple[str, MqttSettings]:
    """A new job with its account: id, and the broker's settings as its worker uses them."""
    job_id, secret = jobs.register()
    assert accounts.wait_effective(job_id, EFFECTIVE_S)
    return job_id, job_broker(accounts._settings.mqtt, job_id, secret)


def two_jobs(
    jobs: FoldedJobs, start_accounts: Start, **changes: object
) -> tuple[MqttAccounts, str, MqttSettings, str]:
    """The companion with two jobs: the first one's id and its worker's settings, the other one's id."""
    accounts = start_accounts(**changes)
    mine, worker = registered(jobs, accounts)
    other, _ = registered(jobs, accounts)
    return accounts, mine, worker, other


def publish_each(mqtt: MqttSettings, topics: list[str], payload: bytes) -> None:
    """Publish on a connection each: Mosquitto cuts the one on which it has denied something."""
    for topic in topics:
        publish_all(mqtt, [(topic, payload)])


def payloads(messages: list) -> list[bytes]:
    return [message.payload for message in messages]


def test_a_registered_job_gets_in_with_the_password_of_its_secret_and_with_no_other(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    accounts = start_accounts()
    (first, secret), (second, other) = jobs.register(), jobs.register()
    accounts.registered(first)
    accounts.registered(second)
    assert job_login(settings, first, secret) is LoginAnswer.LET_IN
    assert job_login(settings, first, other) is LoginAnswer.REFUSED
    assert login(settings, first, mqtt_password(other, second)) is LoginAnswer.REFUSED
    assert login(settings, first, secret) is LoginAnswer.REFUSED
    assert login(settings, first) is LoginAnswer.REFUSED
    assert login(settings) is LoginAnswer.REFUSED
    assert login(settings, "ffffffff", mqtt_password(secret, "ffffffff")) is LoginAnswer.REFUSED


def test_a_worker_writes_only_the_events_of_its_own_job(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    _, mine, worker, other = two_jobs(jobs, start_accounts)
    with listening(role_mqtt(settings, OPERATOR), "#") as heard:
        forged = [f"{other}/events", f"{mine}/receipts", f"{other}/receipts", "bridge/x", f"{mine}/events/x"]
        publish_each(worker, forged, b"forged")
        publish_all(worker, [(f"{mine}/events", b"my own")])
        wait_until(lambda: b"my own" in payloads(heard), what="its own event")
    assert payloads(heard) == [b"my own"]


def test_a_worker_reads_only_the_receipts_of_its_own_job(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    _, mine, worker, other = two_jobs(jobs, start_accounts)
    operator = role_mqtt(settings, OPERATOR)
    publish_all(operator, [(f"{other}/events", b"retained")], retain=True)
    with listening(worker, "#") as all_of_it, listening(worker, f"{other}/receipts") as others:
        topics = [f"{other}/receipts", f"{other}/events", f"{mine}/events", "bridge/x"]
        publish_all(operator, [(topic, b"not yours") for topic in topics])
        publish_all(operator, [(f"{mine}/receipts", b"yours")])
        wait_until(lambda: b"yours" in payloads(all_of_it), what="its own receipt")
    publish_all(operator, [(f"{other}/events", b"")], retain=True)
    assert payloads(all_of_it) == [b"yours"]
    assert others == []


def test_a_delegator_reads_events_and_receipts_and_writes_neither(settings: Settings) -> None:
    operator, delegator = role_mqtt(settings, OPERATOR), role_mqtt(settings, DELEGATOR)
    with listening(delegator, "#") as read, listening(operator, "#") as written:
        publish_each(delegator, ["0a1b2c3d/events", "0a1b2c3d/receipts", "bridge/x"], b"forged")
        publish_all(
            operator, [("bridge/x", b"internal"), ("0a1b2c3d/events", b"1"), ("0a1b2c3d/receipts", b"2")]
        )
        wait_until(lambda: len(read) >= 2 and len(written) >= 3, what="what the operator wrote")
    assert payloads(read) == [b"1", b"2"]
    assert payloads(written) == [b"internal", b"1", b"2"]


def test_the_bridge_reads_events_and_writes_receipts_and_not_the_other_way_round(settings: Settings) -> None:
    operator, bridge = role_mqtt(settings, OPERATOR), role_mqtt(settings, BRIDGE)
    with listening(bridge, "#") as read, listening(operator, "#") as written:
        publish_each(bridge, ["0a1b2c3d/events"], b"forged")
        publish_all(bridge, [("0a1b2c3d/receipts", b"1"), ("bridge/x", b"2")])
        publish_all(operator, [("0a1b2c3d/receipts", b"3"), ("0a1b2c3d/events", b"4")])
        wait_until(lambda: b"4" in payloads(read) and b"4" in payloads(written), what="the last")
    assert payloads(read) == [b"2", b"4"]
    assert payloads(written) == [b"1", b"2", b"3", b"4"]


def test_an_account_goes_after_the_grace_time_and_its_connection_with_it(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    accounts, job_id, worker, stays = two_jobs(jobs, start_accounts, account_grace_s=5)
    secret = jobs.secrets[job_id]
    with listening(worker, f"{job_id}/receipts") as heard:
        jobs.end(job_id)
        registered(jobs, accounts)
        # Within the grace time it gets in, so that a resend still works.
        assert job_login(settings, job_id, secret) is LoginAnswer.LET_IN
        wait_until(
            lambda: job_login(settings, job_id, secret) is LoginAnswer.REFUSED, 30, "the account has gone"
        )
        publish_all(role_mqtt(settings, OPERATOR), [(f"{job_id}/receipts", b"too late")])
    assert heard == []
    assert job_id not in read_lines(accounts._folder / PASSWORDS)
    assert job_login(settings, stays, jobs.secrets[stays]) is LoginAnswer.LET_IN


@pytest.mark.requirement("JE-23")
def test_after_a_rotation_both_workers_stay_connected_until_the_end_of_the_overlap(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    accounts, job_id, old, _ = two_jobs(jobs, start_accounts)
    old_secret, operator = jobs.secrets[job_id], role_mqtt(settings, OPERATOR)
    with listening(old, f"{job_id}/receipts") as old_heard:
        secret = jobs.rotate(job_id, overlap_s=6)
        assert accounts.wait_effective(job_user(job_id, secret), EFFECTIVE_S)
        new = job_broker(settings.mqtt, job_id, secret)
        with listening(new, f"{job_id}/receipts") as new_heard:
            assert job_login(settings, job_id, old_secret) is LoginAnswer.LET_IN
            publish_all(operator, [(f"{job_id}/receipts", b"for both")])
            wait_until(lambda: old_heard and new_heard, what="both hear it")
            wait_until(
                lambda: job_login(settings, job_id, old_secret) is LoginAnswer.REFUSED,
                30,
                "the overlap is over",
            )
            publish_all(operator, [(f"{job_id}/receipts", b"for the new one")])
            wait_until(lambda: len(new_heard) == 2, what="the new one hears it")
    assert payloads(old_heard) == [b"for both"]
    assert job_login(settings, job_id, secret) is LoginAnswer.LET_IN
    assert job_id not in read_lines(accounts._folder / PASSWORDS)


@pytest.mark.requirement("JE-23")
def test_with_a_rotated_secret_a_worker_has_the_rights_of_its_own_job_and_no_others(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    accounts, mine, old, other = two_jobs(jobs, start_accounts)
    secret = jobs.rotate(mine, overlap_s=60)
    user = job_user(mine, secret)
    assert accounts.wait_effective(user, EFFECTIVE_S)
    new, operator = job_broker(settings.mqtt, mine, secret), role_mqtt(settings, OPERATOR)
    with listening(operator, "#") as heard, listening(new, "#") as read:
        forged = [f"{other}/events", f"{mine}/receipts", f"{user}/events", f"{other}/receipts", "bridge/x"]
        publish_each(new, forged, b"forged")
        publish_all(operator, [(f"{other}/receipts", b"not yours"), (f"{user}/receipts", b"nobody's")])
        publish_all(operator, [(f"{mine}/receipts", b"yours")])
        publish_each(old, [f"{mine}/events"], b"by the old")
        publish_each(new, [f"{mine}/events"], b"by the new")
        wait_until(lambda: read and b"by the new" in payloads(heard), what="what it may")
    assert payloads(read) == [b"yours"]
    assert payloads(heard) == [b"not yours", b"nobody's", b"yours", b"by the old", b"by the new"]


@pytest.mark.requirement("JE-23")
def test_each_rotation_replaces_the_old_account_and_the_end_of_the_job_takes_all_away(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    accounts = start_accounts(account_grace_s=3)
    job_id, _ = registered(jobs, accounts)
    secrets = [jobs.secrets[job_id]]
    for _ in range(2):
        secrets.append(jobs.rotate(job_id, overlap_s=60))
        assert accounts.wait_effective(job_user(job_id, secrets[-1]), EFFECTIVE_S)
    wanted = [LoginAnswer.REFUSED, LoginAnswer.LET_IN, LoginAnswer.LET_IN]
    assert [job_login(settings, job_id, secret) for secret in secrets] == wanted
    jobs.end(job_id)
    for secret in secrets:
        wait_until(lambda one=secret: job_login(settings, job_id, one) is LoginAnswer.REFUSED, 30, "its end")
    assert not any(user.startswith(job_id) for user in read_lines(accounts._folder / PASSWORDS))


@pytest.mark.requirement("JE-23")
def test_a_rotation_while_the_companion_was_away_is_followed_by_the_next_one(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    accounts, at_once, _, later = two_jobs(jobs, start_accounts)
    before = dict(jobs.secrets)
    accounts.close()
    jobs.listeners.clear()
    new = {at_once: jobs.rotate(at_once, overlap_s=0), later: jobs.rotate(later, overlap_s=60)}
    again = start_accounts()
    for job_id, secret in new.items():
        assert again.wait_effective(job_user(job_id, secret), EFFECTIVE_S)
        assert job_login(settings, job_id, secret) is LoginAnswer.LET_IN
    assert job_login(settings, at_once, before[at_once]) is LoginAnswer.REFUSED
    assert job_login(settings, later, before[later]) is LoginAnswer.LET_IN


def test_a_restarted_companion_keeps_what_is_right_and_mends_the_rest(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    accounts, stays, _, ended = two_jobs(jobs, start_accounts)
    before = read_lines(accounts._folder / PASSWORDS)
    accounts.close()
    jobs.listeners.clear()
    jobs.end(ended, ago_s=settings.mqtt.account_grace_s + 1)
    meanwhile, secret = jobs.register()
    again = start_accounts()
    assert again.wait_effective(meanwhile, EFFECTIVE_S)
    after = read_lines(again._folder / PASSWORDS)
    assert after[stays] == before[stays]
    assert {role: after[role] for role in (OPERATOR, BRIDGE, DELEGATOR)}.items() <= before.items()
    assert ended not in after
    assert job_login(settings, meanwhile, secret) is LoginAnswer.LET_IN


def test_accounts_survive_the_broker_and_those_made_while_it_is_away_follow(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start, guarded_stack: LocalStack
) -> None:
    accounts = start_accounts()
    before, _ = registered(jobs, accounts)
    guarded_stack["mosquitto"].kill()
    meanwhile, secret = jobs.register()
    begun = time.monotonic()
    accounts.registered(meanwhile)
    assert time.monotonic() - begun < 5, "a registration waits a second at most"
    guarded_stack["mosquitto"].start()
    assert job_login(settings, before, jobs.secrets[before]) is LoginAnswer.LET_IN
    assert accounts.wait_effective(meanwhile, EFFECTIVE_S)
    assert job_login(settings, meanwhile, secret) is LoginAnswer.LET_IN


def test_a_thousand_jobs_registered_at_once_all_get_in_soon(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start
) -> None:
    accounts = start_accounts()
    begun = time.monotonic()
    job_ids = [jobs.register()[0] for _ in range(MANY)]
    assert all(accounts.wait_effective(job_id, 30) for job_id in job_ids)
    assert time.monotonic() - begun < 30
    for job_id in (job_ids[0], job_ids[MANY // 2], job_ids[-1]):
        assert job_login(settings, job_id, jobs.secrets[job_id]) is LoginAnswer.LET_IN


@pytest.mark.requirement("JE-15")
def test_a_publish_waits_for_an_account_that_is_on_its_way(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start, tmp_path: Path
) -> None:
    job_id, secret = jobs.register()
    late = threading.Timer(0.3, start_accounts)
    late.start()
    try:
        patient = with_mqtt(settings, publish_attempts=20)
        publisher = Job(job_id, secret, mqtt=patient.mqtt, state_dir=tmp_path)
        assert publisher.publish("started", "", wait_for_receipt=False).seq == 1
    finally:
        late.join()


@pytest.mark.requirement("JE-15")
def test_a_publish_without_an_account_is_refused_after_its_attempts(settings: Settings, tmp_path: Path) -> None:
    hasty = with_mqtt(settings, backoff_base_s=0.05, publish_attempts=3)
    with pytest.raises(
        Refused, match=r"(?s)does not let user '0a1b2c3d' in.*gateway.*\(3 attempts\)"
    ) as caught:
        Job("0a1b2c3d", "a secret", mqtt=hasty.mqtt, state_dir=tmp_path).publish("started", "")
    assert mqtt_password("a secret", "0a1b2c3d") not in str(caught.value)


@pytest.mark.requirement("CM-05")
def test_no_password_is_in_a_log_a_conf_or_the_process_list_and_every_key_file_is_private(
    settings: Settings, jobs: FoldedJobs, start_accounts: Start, guarded_stack: LocalStack
) -> None:
    accounts = start_accounts()
    job_id, _ = registered(jobs, accounts)
    roles = load_role_passwords(settings)
    assert roles is not None
    secrets = [password.get_secret_value() for password in roles.values()]
    secrets += [jobs.secrets[job_id], mqtt_password(jobs.secrets[job_id], job_id)]
    login(settings, OPERATOR, "wrong")
    keys = settings.data_path / "keys"
    for path in (keys / "mqtt.json", accounts._folder / PASSWORDS, accounts._folder / "acl"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    texts = {
        str(path): path.read_bytes().decode("utf-8", "replace")
        for path in settings.data_path.rglob("*")
        if path.is_file() and path.parent != keys
    }
    for process in psutil.process_iter():
        try:
            texts[str(process)] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    assert any("mosquitto.conf" in name for name in texts) and any("mosquitto.log" in name for name in texts)
    assert [name for name, text in texts.items() if any(secret in text for secret in secrets)] == []
    assert not any(secret in repr((settings, role_mqtt(settings, OPERATOR))) for secret in secrets)


@pytest.mark.requirement("CM-05")
def test_a_line_of_mosquittos_own_tool_fits_and_a_broken_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "by mosquitto"
    tool = ["mosquitto_passwd", "-c", "-b", str(path), "0a1b2c3d", "correct horse"]
    subprocess.run(tool, check=True, env=os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin"}, timeout=30)
    line = read_lines(path)["0a1b2c3d"]
    assert line_fits(line, "0a1b2c3d", "correct horse")
    assert not line_fits(line, "0a1b2c3d", "another horse")
    assert not line_fits(line, "deadbeef", "correct horse")
    for broken in ("", "0a1b2c3d:", line[:-3], line.replace("$7$", "$6$"), line.replace("$101$", "$0$")):
        assert not line_fits(broken, "0a1b2c3d", "correct horse"), broken
