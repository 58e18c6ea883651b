"""Job events over HTTP at real gateways: the answer has the verdict, the log the bytes that came (DL-08).

The stack of `hub` has no MQTT broker, so a job that lives there lives without MQTT.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from connectors.plumbing.gateway_client.gateway_access import read_token
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import JOBS, PRINCIPALS, register, settled_log
from tests.connectors.doors.http_api.hub_stack import MESSAGES, said
from tests.mqtt_wire import listening, publish_all
from tests.raw_records import read_to_end
from tests.schemas.job_records import NOTATIONS, signed, written
from trunkline_agent.credentials import HubAccess
from trunkline_agent.jobs.job import Job as Publisher
from trunkline_agent.wire.ids import content_id

JSON = {"Content-Type": "application/json"}
VERDICT = "Trunkline-Verdict"
LIFE = (("started", "begins"), ("progress", "größer 𝄞"), ("progress", ""), ("error", "no disk"))


class Job:
    """A registered job that a worker has picked."""

    def __init__(self, hub, **fields):
        self.hub = hub
        self.worker, self.token = hub.principal("worker")
        self.delegator, token = hub.principal("delegator")
        self.registrar = hub.client(token)
        told = register(self.registrar, session=self.worker, **fields)
        self.id, self.secret = told["job_id"], told["secret"]
        self.path = f"{JOBS}/{self.id}/events"
        self.here, self.there = hub.client(self.token), hub.client(self.token, 1)

    def picked(self):
        """The job, picked at the other gateway."""
        answer = self.there.post(f"{JOBS}/pick", json={"session": self.worker})
        assert (answer.status_code, answer.json()["job_id"]) == (200, self.id)
        return self

    def event(self, seq, kind="progress", /, secret=None, **changed):
        """A signed event."""
        return signed(seq, kind, secret or self.secret, **{"job_id": self.id, **changed})

    def post(self, body, at=None, **headers):
        """Report an event: an object, or its bytes."""
        content = body if isinstance(body, bytes) else written(body)
        return (at or self.here).post(self.path, content=content, headers={**JSON, **headers})

    def row(self, at=None):
        """The job as the operator sees it."""
        return (at or self.hub.operator).get(f"{JOBS}/{self.id}").json()

    def logged(self):
        """Source and bytes of the events of this job in the log."""
        return events_in_log(self.hub.settings, self.id)

    def refusals(self, principal=None):
        """The reasons of the refusals of a principal, by default of the worker."""
        found = [one.value for one in read_to_end(self.hub.settings.kafka) if one.key == b"refused/http"]
        refusals = [json.loads(value) for value in found]
        return [one["reason"] for one in refusals if one["principal"] == (principal or self.worker)]


def events_in_log(settings, job_id):
    """Source and bytes of the events of a job in the log."""
    found = []
    for record in read_to_end(settings.kafka):
        headers = {name: value.decode() for name, value in record.headers}
        if record.key == f"job/{job_id}".encode() and headers["ce_type"] == "job.event":
            found.append((headers["ce_source"], record.value))
    return found


@pytest.mark.requirement("DL-08")
def test_a_job_lives_from_registration_to_end_without_mqtt_at_two_gateways(hub):
    job = Job(hub, notify=["end", "permission"]).picked()
    kinds = ("started", "progress", "permission_required", "progress", "completed")
    payloads = [written(job.event(seq, kind), "spaced") for seq, kind in enumerate(kinds, 1)]
    for seq, payload in enumerate(payloads, 1):
        answer = job.post(payload, (job.here, job.there)[seq % 2])
        assert (answer.status_code, answer.headers[VERDICT]) == (200, "accepted"), answer.text
        told = answer.json()
        assert len(told.pop("position")) == 2
        assert told == {
            "ce_id": content_id(f"job/{job.id}".encode(), payload),
            "seq": seq,
            "verdict": "accepted",
            "reason": None,
            "status": "completed" if seq == len(kinds) else "running",
        }
    assert job.logged() == [(f"http/{job.worker}", payload) for payload in payloads]
    for client in (hub.operator, hub.other):
        wait_until(lambda client=client: job.row(client)["status"] == "completed", what="the end")
        row = job.row(client)
        assert (row["events"], row["last_seq"], row["last_event"]) == (5, 5, "completed")
        assert (row["session"], row["registered_by"]) == (job.worker, f"http/{job.delegator}")
    notices = []

    def notified():
        notices.extend(job.registrar.get(MESSAGES).json()["messages"])
        return len(notices) >= 2

    wait_until(notified, what="both notices to the delegator")
    assert [one["payload"]["job_id"] for one in notices] == [job.id, job.id]


@pytest.mark.requirement("DL-08")
def test_a_repeated_event_is_a_duplicate_with_the_same_answer_and_changes_nothing(hub):
    job = Job(hub).picked()
    event = job.event(1, "started")
    first = job.post(written(event)).json()
    before = job.row()
    for client in (job.here, job.there, job.here):
        again = job.post(written(event), client)
        assert (again.status_code, again.headers[VERDICT]) == (200, "duplicate")
        told = again.json()
        assert told.pop("position") > first["position"]
        assert told == {**{k: v for k, v in first.items() if k != "position"}, "verdict": "duplicate"}
    # The same content in other bytes is the same event with another id.
    for notation in set(NOTATIONS) - {"canonical"}:
        again = job.post(written(event, notation))
        assert (again.status_code, again.json()["verdict"]) == (200, "duplicate")
        assert again.json()["ce_id"] != first["ce_id"]
    assert job.row() == before


@pytest.mark.requirement("DL-08")
def test_an_event_that_is_sent_to_two_gateways_at_once_counts_once(hub):
    job = Job(hub).picked()
    payloads = [written(job.event(seq)) for seq in range(1, 11)]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(job.post, payload, client) for payload in payloads for client in (job.here, job.there)
        ]
        answers = [one.result(30) for one in asked]
    assert {answer.status_code for answer in answers} == {200}
    for here, there in zip(answers[::2], answers[1::2], strict=True):
        assert sorted(one.json()["verdict"] for one in (here, there)) == ["accepted", "duplicate"]
    assert (job.row()["events"], job.row()["last_seq"]) == (10, 10)


@pytest.mark.requirement("DL-08")
def test_a_worker_reports_at_the_other_gateway_at_once_after_its_pick(hub):
    job = Job(hub).picked()
    assert job.post(job.event(1, "completed")).status_code == 200
    clients = (job.here, job.there)
    for number in range(30):
        picks, reports = clients[number % 2], clients[1 - number % 2]
        told = register(job.registrar, session=job.worker)
        payload = written(signed(1, "completed", told["secret"], job_id=told["job_id"]))
        assert picks.post(f"{JOBS}/pick", json={"session": job.worker}).json()["job_id"] == told["job_id"]
        answer = reports.post(f"{JOBS}/{told['job_id']}/events", content=payload, headers=JSON)
        assert (answer.status_code, answer.json().get("status")) == (200, "completed")


@pytest.mark.requirement("DL-08")
def test_a_gap_and_a_late_event_are_accepted_until_the_end_and_nothing_is_after_it(hub):
    job = Job(hub).picked()
    for seq in (1, 7, 3):
        assert job.post(job.event(seq)).json()["verdict"] == "accepted"
    assert job.row()["last_seq"] == 7
    assert said(job.post(job.event(3, detail="another"))) == (409, "seq_conflict")
    assert job.post(job.event(8, "completed")).json()["status"] == "completed"
    before = job.row()
    for event in (job.event(9), job.event(4), job.event(9, "error")):
        assert said(job.post(event, job.there)) == (409, "after_terminal")
    # Events from before the end are still known.
    for event in (job.event(3), job.event(8, "completed")):
        assert job.post(event).json()["verdict"] == "duplicate"
    assert job.row() == before
    late = [one.late for one in settled_log(hub.settings) if (one.stream, one.seq) == (f"job/{job.id}", 3)]
    assert late[0] and not any(late[1:])


def _rejected(job):
    """Events that the fold rejects: their name, bytes, status and reason."""
    good = job.event(2)
    unsigned = {**good, "data": {}}
    return (
        ("forged", written(job.event(2, secret="another")), 403, "bad_signature"),
        ("changed", written({**good, "detail": "4/10"}), 403, "bad_signature"),
        ("unsigned", written(unsigned), 403, "bad_signature"),
        ("of another job", written(job.event(2, job_id="00000000")), 400, "malformed"),
        ("cut", written(good)[:-1], 400, "malformed"),
        ("empty", b"", 400, "malformed"),
        ("a list", b"[]", 400, "malformed"),
        ("no UTF-8", b'{"detail": "\xff"}', 400, "malformed"),
        ("a key twice", b'{"seq": 1, "seq": 2}', 400, "malformed"),
        (
            "without a version",
            written({k: v for k, v in good.items() if k != "schema_version"}),
            400,
            "malformed",
        ),
        ("of a later version", written(job.event(2, schema_version=2)), 400, "schema_version"),
        ("no seq", written(job.event(0)), 400, "malformed"),
        ("no such kind", written(job.event(2, "finished")), 400, "malformed"),
        ("a token inside", written(job.event(2, data={"auth_token": "t"})), 400, "secret_in_event"),
        ("begins twice", written(job.event(2, "started")), 409, "illegal_transition"),
        ("other content", written(job.event(1, "started", detail="another")), 409, "seq_conflict"),
    )


@pytest.mark.requirement("DL-08")
def test_a_rejected_event_is_in_the_log_once_with_its_bytes_and_changes_nothing(hub):
    job = Job(hub).picked()
    first = written(job.event(1, "started"))
    assert job.post(first).status_code == 200
    before, cases = job.row(), _rejected(job)
    for number, (name, payload, status, reason) in enumerate(cases):
        answer = job.post(payload, (job.here, job.there)[number % 2])
        assert said(answer) == (status, reason), name
        assert answer.headers[VERDICT] == "rejected", name
        assert set(answer.json()) == {"reason", "message"}
        assert job.secret not in answer.text
    assert job.row() == before
    assert [value for _, value in job.logged()] == [first, *(payload for _, payload, _, _ in cases)]
    verdicts = [one for one in settled_log(hub.settings) if one.stream == f"job/{job.id}" and one.reason]
    assert [one.reason for one in verdicts] == [reason for *_, reason in cases]
    # The record of the event is the record of its refusal.
    assert job.refusals() == []


@pytest.mark.requirement("DL-08")
def test_who_has_no_right_to_a_job_reports_nothing_about_it(hub):
    job = Job(hub)
    payload = written(job.event(1, "started"))
    stranger, other_registrar = Job(hub).picked(), Job(hub)
    _, viewer = hub.principal("viewer")
    # Nobody has the job yet, so it is no worker's.
    for client in (job.here, stranger.here, stranger.there, other_registrar.registrar, hub.client(viewer)):
        assert said(job.post(payload, client)) == (403, "policy")
    assert said(job.post(payload, hub.client(""))) == (401, "unauthorized")
    assert said(job.post(payload, hub.client("no-such-token" * 3))) == (401, "unauthorized")
    unknown = f"{JOBS}/00000000/events"
    answer = job.here.post(unknown, content=payload, headers=JSON)
    assert said(answer) == (403, "policy")
    assert VERDICT not in answer.headers
    answer = hub.operator.post(unknown, content=written(job.event(1, job_id="00000000")), headers=JSON)
    assert (said(answer), answer.headers[VERDICT]) == ((404, "unknown_stream"), "rejected")
    assert job.here.post(f"{JOBS}/NO-JOB/events", content=payload, headers=JSON).status_code in (400, 403)
    assert job.logged() == []
    assert set(job.refusals(stranger.worker)) == {"policy"}
    for client in (job.registrar, job.picked().here, hub.other):
        assert job.post(payload, client).status_code == 200
    assert [source for source, _ in job.logged()] == [
        f"http/{name}" for name in (job.delegator, job.worker, "operator")
    ]


@pytest.mark.requirement("DL-08")
def test_a_revoked_worker_reports_nothing_and_the_delegator_ends_its_job(hub):
    job = Job(hub).picked()
    assert job.post(job.event(1, "started")).status_code == 200
    assert hub.operator.post(f"{PRINCIPALS}/{job.worker}/revoke", json={}).status_code == 200
    for client in (job.here, job.there):
        wait_until(
            lambda client=client: said(job.post(job.event(2), client)) == (401, "unauthorized"), what="revoked"
        )
    events = job.row()["events"]
    assert events in (1, 2)
    assert job.post(job.event(3, "error"), job.registrar).json()["status"] == "error"
    assert job.row()["events"] == events + 1


@pytest.mark.requirement("DL-08")
def test_a_body_that_is_too_long_or_of_another_type_does_not_reach_the_job(hub):
    job = Job(hub).picked()
    most = hub.settings.limits.payload_bytes
    room = most - len(written(job.event(1, data={"text": ""})))
    longest = written(job.event(1, data={"text": "x" * room}))
    assert len(longest) == most
    too_long = job.post(written(job.event(1, data={"text": "x" * (room + 1)})))
    assert (said(too_long), VERDICT in too_long.headers) == ((413, "too_large"), False)
    for wrong in ("text/plain", "application/x-www-form-urlencoded", "application/xml", ""):
        answer = job.post(longest, **{"Content-Type": wrong})
        assert said(answer) == (415, "unsupported_media_type")
        assert "application/json" in answer.json()["message"]
    assert job.logged() == []
    assert job.post(longest, **{"Content-Type": "Application/JSON; charset=utf-8"}).status_code == 200
    assert [value for _, value in job.logged()] == [longest]
    assert job.refusals() == ["too_large"]


def _shape(row):
    """A job's row without what differs between two jobs."""
    own = {"job_id", "session", "session_wanted", "ended_by"}
    return {name: value for name, value in row.items() if name not in own and not name.endswith("_at")}


@pytest.mark.requirement("DL-08")
def test_a_job_over_http_has_the_rows_and_bytes_that_it_has_over_mqtt(
    backbone_settings, start_gateway, start_bridge, tmp_path
):
    gateway = start_gateway()
    settings = gateway.settings
    start_bridge(settings)
    with gateway.client() as operator:
        jobs = {door: register(operator, session=door) for door in ("mqtt", "http")}
        for door in jobs:
            assert operator.post(f"{JOBS}/pick", json={"session": door}).status_code == 200
        for door, job in jobs.items():
            over = HubAccess(settings.gateway_url, read_token(settings)) if door == "http" else None
            publisher = Publisher(
                job["job_id"], job["secret"], mqtt=settings.mqtt, state_dir=tmp_path / door, hub=over
            )
            for seq, (event, detail) in enumerate(LIFE, 1):
                receipt = publisher.publish(event, detail, {"done": seq, "ratio": 0.1, "big": 2**63 - 1})
                assert (receipt.seq, receipt.verdict, receipt.reason) == (seq, "accepted", None)
        rows = {door: operator.get(f"{JOBS}/{job['job_id']}").json() for door, job in jobs.items()}
    assert _shape(rows["http"]) == _shape(rows["mqtt"])
    assert (rows["http"]["status"], rows["http"]["events"]) == ("error", len(LIFE))
    found = {}
    for door, job in jobs.items():
        settled = [one for one in settled_log(settings) if one.stream == f"job/{job['job_id']}" and one.seq]
        decisions = [(one.seq, one.verdict, one.reason, one.late, one.status_after) for one in settled]
        # The publisher's bytes, but for what differs between two jobs.
        sources, values = zip(*events_in_log(settings, job["job_id"]), strict=True)
        assert set(sources) == {{"mqtt": "mqtt/unverified", "http": "http/operator"}[door]}
        events = [json.loads(value) for value in values]
        assert [written(event) for event in events] == list(values)
        for event in events:
            del event["job_id"], event["timestamp"], event["data"]["hmac_sig"]
        found[door] = (decisions, events)
    assert found["http"] == found["mqtt"]
    assert len(found["http"][0]) == len(LIFE)


@pytest.mark.requirement("DL-08")
def test_an_event_that_came_by_mqtt_and_by_http_counts_once(backbone_settings, start_gateway, start_bridge):
    gateway = start_gateway()
    mqtt = gateway.settings.mqtt
    start_bridge(gateway.settings)
    with gateway.client() as operator:
        job = register(operator)
        job_id, path = job["job_id"], f"{JOBS}/{job['job_id']}/events"
        events = [written(signed(seq, "progress", job["secret"], job_id=job_id)) for seq in (1, 2)]
        with listening(mqtt, f"{job_id}/receipts") as receipts:
            publish_all(mqtt, [(f"{job_id}/events", events[0])])
            wait_until(lambda: len(receipts) == 1, what="the receipt of the first")
            answer = operator.post(path, content=events[0], headers=JSON)
            assert (answer.status_code, answer.json()["verdict"]) == (200, "duplicate")
            assert operator.post(path, content=events[1], headers=JSON).json()["verdict"] == "accepted"
            publish_all(mqtt, [(f"{job_id}/events", events[1])])
            wait_until(lambda: len(receipts) == 2, what="the receipt of the second")
        told = [json.loads(one.payload) for one in receipts]
        assert [(one["seq"], one["verdict"]) for one in told] == [(1, "accepted"), (2, "duplicate")]
        row = operator.get(f"{JOBS}/{job_id}").json()
    assert (row["events"], row["last_seq"]) == (2, 2)
    logged = [value for _, value in events_in_log(gateway.settings, job_id)]
    assert logged == [events[0], events[0], events[1], events[1]]


@pytest.mark.requirement("DL-08")
@pytest.mark.requirement("OP-40")
def test_the_pages_lines_for_a_shell_report_an_event_with_curl(hub, tmp_path):
    job = Job(hub).picked()
    page = (PROJECT_ROOT / "docs" / "how-to" / "publish_from_another_language.md").read_text(encoding="utf-8")
    for name in ("sign.py", "event.py"):
        (text,) = re.findall(rf"```python\n(# {name}: .*?)```", page, re.DOTALL)
        (tmp_path / name).write_text(text)
    (lines,) = re.findall(r"```shell\n(.*?)```", page, re.DOTALL)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRUNKLINE_URL": hub.gateways[0].url,
        "TRUNKLINE_TOKEN": job.token,
        "JOB_ID": job.id,
        "JOB_SECRET": job.secret,
    }
    for verdict in ("accepted", "seq_conflict"):
        script = ["sh", "-ec", lines]
        done = subprocess.run(
            script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        told = json.loads(done.stdout)
        assert verdict in (told.get("verdict"), told.get("reason"))
        time.sleep(1.1)  # another timestamp is another content
    assert job.row()["last_event"] == "started"
