"""A job's new secret by a real gateway: told once, good at once, and the one before it for the overlap."""

from __future__ import annotations

import itertools
import json
import time
from datetime import datetime

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import JOBS, register, server_events
from tests.connectors.doors.http_api.test_gateway_streams import job_event
from trunkline_agent.wire.mqtt_password import job_user, mqtt_password

pytestmark = pytest.mark.requirement("CM-05")


def rotate(client, job_id, key=None, **body):
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"{JOBS}/{job_id}/secret", json=body or None, headers=headers)


def signed_by(job, secret, seq):
    return job_event({**job, "secret": secret}, seq, "progress")


def test_both_secrets_sign_until_the_overlap_is_over_and_then_the_new_one_alone(operator, publisher):
    job = register(operator)
    old, path = job["secret"], f"{JOBS}/{job['job_id']}/events"
    with operator.stream("GET", path) as answer:
        events = server_events(answer)
        assert next(events).name == "snapshot"
        told = rotate(operator, job["job_id"], overlap_s=5).json()
        new = told["secret"]
        assert new != old and told["mqtt_user"] == job_user(job["job_id"], new) != job["job_id"]
        end = datetime.fromisoformat(told["old_secret_ends_at"])
        for seq, secret in ((1, old), (2, new), (3, "nobody's")):
            publisher.append(signed_by(job, secret, seq)).result(10)
        rotated, *during = (event.data for event in itertools.islice(events, 4))
        assert (rotated["type"], rotated["verdict"]) == ("job.secret_rotated", "accepted")
        assert sorted(rotated["body"]) == ["job_id", "overlap_ms", "request_id", "schema_version"]
        assert [(e["verdict"], e["reason"]) for e in during] == [
            ("accepted", None),
            ("accepted", None),
            ("rejected", "bad_signature"),
        ]
        wait_until(lambda: time.time() > end.timestamp(), what="the end of the overlap")
        for seq, secret in ((3, old), (3, new)):
            publisher.append(signed_by(job, secret, seq)).result(10)
        after = [event.data for event in itertools.islice(events, 2)]
    assert [(e["verdict"], e["reason"]) for e in after] == [("rejected", "bad_signature"), ("accepted", None)]
    row = operator.get(f"{JOBS}/{job['job_id']}").json()
    assert (row["secret_rotations"], row["old_secret_ends_at"]) == (1, told["old_secret_ends_at"])


@pytest.mark.requirement("CM-04")
def test_the_same_request_again_has_the_same_answer_until_another_has_replaced_it(operator):
    job_id = register(operator)["job_id"]
    first = rotate(operator, job_id, "k1", overlap_s=600)
    assert (first.status_code, first.headers["Trunkline-Verdict"]) == (201, "accepted")
    again = rotate(operator, job_id, "k1", overlap_s=600)
    assert (again.status_code, again.headers["Trunkline-Verdict"]) == (201, "duplicate")
    assert {**again.json(), "position": None} == {**first.json(), "position": None}
    assert operator.get(f"{JOBS}/{job_id}").json()["secret_rotations"] == 1
    other = rotate(operator, job_id, "k1", overlap_s=601)
    assert (other.status_code, other.json()["reason"]) == (409, "seq_conflict")
    second = rotate(operator, job_id).json()
    assert second["secret"] != first.json()["secret"]
    late = rotate(operator, job_id, "k1", overlap_s=600)
    assert (late.status_code, late.json()["reason"]) == (409, "seq_conflict")
    another_job = rotate(operator, register(operator)["job_id"], "k1", overlap_s=600)
    assert another_job.status_code == 201 and another_job.json()["secret"] != first.json()["secret"]


@pytest.mark.requirement("JE-10")
@pytest.mark.requirement("JE-11")
def test_who_registers_or_picks_the_job_again_is_told_the_secret_of_now(operator):
    key = {"Idempotency-Key": "once"}
    fields = {"description": "x", "session": "s", "broker": {"host": "mq", "password": "p"}}
    job = operator.post(JOBS, json=fields, headers=key).json()
    operator.post(f"{JOBS}/pick", json={"session": "s"})
    new = rotate(operator, job["job_id"]).json()["secret"]
    picked = operator.post(f"{JOBS}/pick", json={"session": "s"}).json()
    assert (picked["job_id"], picked["secret"], picked["broker"]["password"]) == (job["job_id"], new, "p")
    again = operator.post(JOBS, json=fields, headers=key)
    assert (again.status_code, again.headers["Trunkline-Verdict"]) == (201, "duplicate")
    assert (again.json()["job_id"], again.json()["secret"]) == (job["job_id"], new)


def test_an_unknown_or_ended_job_and_a_bad_overlap_are_refused(operator):
    assert rotate(operator, "00000000").json()["reason"] == "unknown_stream"
    job_id = register(operator)["job_id"]
    for bad in (-1, 30 * 24 * 3600 + 1, 1.5, "1h", None):
        answer = rotate(operator, job_id, overlap_s=bad)
        assert (answer.status_code, answer.json()["reason"]) == (400, "malformed"), bad
    told = rotate(operator, job_id, "k1", overlap_s=0)
    operator.post(f"{JOBS}/{job_id}/cancel", json={})
    over = rotate(operator, job_id)
    assert (over.status_code, over.json()["reason"]) == (409, "after_terminal")
    again = rotate(operator, job_id, "k1", overlap_s=0)
    assert (again.status_code, again.json()["secret"]) == (201, told.json()["secret"])


def test_no_secret_of_a_rotation_is_in_a_log_a_record_a_row_or_another_answer(gateway, operator, read_topic):
    job = register(operator)
    secrets = [job["secret"]]
    secrets += [rotate(operator, job["job_id"], f"k{n}", overlap_s=60).json()["secret"] for n in range(2)]
    rotate(operator, job["job_id"], "k0", overlap_s=60)
    canaries = [*secrets, *(secret.partition(".")[2] or secret for secret in secrets)]
    canaries += [mqtt_password(one, job_user(job["job_id"], one)) for one in secrets]
    texts = [operator.get(f"{JOBS}/{job['job_id']}").text, operator.get(JOBS).text]
    texts += [operator.get("/api/hub/audit").text, operator.get("/metrics").text]
    texts += [json.dumps([record.value.decode(), repr(record.headers)]) for record in read_topic(4)]
    texts.append(gateway.program.log())
    assert any("job.secret_rotated" in text for text in texts)
    assert not [(n, text) for n, text in enumerate(texts) for canary in canaries if canary in text]
