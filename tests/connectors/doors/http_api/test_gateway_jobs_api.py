"""The jobs API of a real gateway: register, pick, cancel, show, list, and requests that are sent again."""

from __future__ import annotations

import json
import uuid

import pytest

from connectors.hub.serving.identities import request_uuid
from schemas.keys.sealing import broker_password_purpose, job_secret_purpose
from schemas.streams.job.job_registry import JobRegistration
from tests.connectors.doors.http_api.hub_access import JOBS, register

PASSWORD = "canary-broker-password"


@pytest.mark.requirement("JE-10")
@pytest.mark.requirement("JE-11")
@pytest.mark.requirement("JE-12")
def test_a_job_is_registered_picked_shown_and_cancelled(operator):
    job = register(operator, session="builder")
    assert len(job["job_id"]) == 8 and len(job["secret"]) == 43
    assert operator.get(f"{JOBS}/{job['job_id']}").json()["status"] == "pending"
    picked = operator.post(f"{JOBS}/pick", json={"session": "builder"})
    assert picked.status_code == 200
    assert picked.json() == {
        "job_id": job["job_id"],
        "description": "build the docs",
        "broker": None,
        "secret": job["secret"],
    }
    again = operator.post(f"{JOBS}/pick", json={"session": "builder"})
    assert again.json() == picked.json()
    row = operator.get(f"{JOBS}/{job['job_id']}").json()
    assert (row["status"], row["session"], row["registered_by"]) == ("running", "builder", "http/operator")
    assert row["picked_at"].endswith("Z")
    cancelled = operator.post(f"{JOBS}/{job['job_id']}/cancel", json={"reason": "no longer needed"})
    assert cancelled.json() == {"job_id": job["job_id"], "status": "cancelled", "verdict": "accepted"}
    over = operator.post(f"{JOBS}/{job['job_id']}/cancel", json={})
    assert (over.status_code, over.json()["reason"]) == (409, "after_terminal")
    unknown = operator.post(f"{JOBS}/00000000/cancel", json={})
    assert (unknown.status_code, unknown.json()["reason"]) == (404, "unknown_stream")
    none = operator.post(f"{JOBS}/pick", json={"session": "builder"})
    assert (none.status_code, none.json()["reason"]) == (404, "no_match")


@pytest.mark.requirement("JE-10")
@pytest.mark.parametrize(("door", "principal"), [("cli", "ann"), ("http", "operator")])
def test_an_id_that_another_request_has_is_passed_over(
    backbone_settings, keyring, start_gateway, publisher, door, principal
):
    made = request_uuid("operator", "k")
    another = {"door": door, "principal": principal}
    taken = JobRegistration(
        sealed_secret=keyring.seal(("s" * 43).encode(), job_secret_purpose(made.hex[:8])),
        job_id=made.hex[:8],
        description="mine",
        request_id="another-one",
    ).record(**another)
    publisher.append(taken).result(10)
    with start_gateway().client() as operator:
        answers = [
            operator.post(JOBS, json={"description": "mine"}, headers={"Idempotency-Key": "k"}).json()
            for _ in range(2)
        ]
        assert answers[0]["job_id"] == answers[1]["job_id"] == uuid.uuid5(made, "taken").hex[:8]
        assert answers[0]["secret"] == answers[1]["secret"]
        assert operator.get(JOBS).json()["total"] == 2


@pytest.mark.requirement("CM-05")
@pytest.mark.requirement("JE-11")
def test_the_winner_gets_the_brokers_password_and_the_log_has_it_sealed(operator, keyring, read_topic):
    overlay = {"host": "mq.example.org", "port": 8883, "tls": True, "username": "bo", "password": PASSWORD}
    for description in ("first", "second"):
        register(operator, description=description, broker=overlay)
    register(operator, broker={"host": "elsewhere"})
    brokers = [json.loads(text) for text in operator.get("/api/hub/brokers").json()["brokers"]]
    assert sorted(broker["host"] for broker in brokers) == ["elsewhere", "mq.example.org"]
    sealed = next(broker["sealed_password"] for broker in brokers if broker["port"] == 8883)
    purpose = broker_password_purpose("mq.example.org", 8883, "bo")
    assert keyring.open(sealed, purpose).decode() == PASSWORD
    picked = operator.post(f"{JOBS}/pick", json={"session": "s"}).json()
    assert picked["description"] == "first"
    assert {name: value for name, value in picked["broker"].items() if value is not None} == overlay
    assert not any(PASSWORD.encode() in (record.value or b"") for record in read_topic(3))
    for job in operator.get(JOBS).json()["jobs"]:
        operator.post(f"{JOBS}/{job['job_id']}/cancel", json={})
    assert operator.get("/api/hub/brokers").json() == {"brokers": [], "left": 0}


@pytest.mark.requirement("JE-12")
def test_jobs_are_listed_newest_first_by_state_session_and_age(operator):
    ids = [register(operator, session="s" if n % 2 else None)["job_id"] for n in range(4)]
    operator.post(f"{JOBS}/{ids[0]}/cancel", json={})

    def listed(**wanted):
        found = operator.get(JOBS, params=wanted).json()
        return [job["job_id"] for job in found["jobs"]], found["total"]

    assert listed() == (ids[::-1], 4)
    assert listed(limit=2) == (ids[:1:-1], 4)
    assert listed(state="cancelled") == ([ids[0]], 1)
    assert listed(session="s") == ([ids[3], ids[1]], 2)
    assert listed(older_than_s=3600) == ([], 0)
    assert listed(newer_than_s=3600)[1] == 4
    for wrong in (
        {"state": "gone"},
        {"limit": 1001},
        {"limit": 0},
        {"sate": "pending"},
        {"older_than_s": "nan"},
    ):
        answer = operator.get(JOBS, params=wrong)
        assert (answer.status_code, answer.json()["reason"]) == (400, "malformed"), wrong


@pytest.mark.requirement("JE-11")
@pytest.mark.requirement("JE-14")
def test_a_session_that_is_not_running_gets_no_new_job(operator):
    register(operator)
    operator.post("/api/hub/sessions", json={"session": "s"})
    operator.post("/api/hub/sessions/s/stop", json={})
    answer = operator.post(f"{JOBS}/pick", json={"session": "s"})
    assert (answer.status_code, answer.json()["reason"]) == (409, "illegal_transition")
    operator.post("/api/hub/sessions/s/resume", json={})
    assert operator.post(f"{JOBS}/pick", json={"session": "s"}).status_code == 200
