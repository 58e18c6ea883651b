"""Sessions, principals and their tokens, mailboxes, and the record of what was refused, at a real gateway."""

from __future__ import annotations

import json
import stat

import pytest

from connectors.plumbing.network.rates import BURST
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import JOBS, PRINCIPALS, SESSIONS, add_principal, register


@pytest.mark.requirement("JE-14")
def test_a_session_is_created_stopped_resumed_and_ended(operator):
    created = operator.post(
        SESSIONS, json={"session": "s", "host": "box", "handle": "tmux/trunkline/s", "description": "d"}
    )
    assert (created.status_code, created.json()["status"]) == (201, "running")
    assert created.json()["created_by"] == "http/operator"
    stopped = operator.post(f"{SESSIONS}/s/stop", json={"reason": "pause", "capture_id": "c1"})
    assert [stopped.json()[n] for n in ("status", "reason", "capture_id")] == ["stopped", "pause", "c1"]
    resumed = operator.post(f"{SESSIONS}/s/resume", json={"handle": "process/1/2"})
    assert [resumed.json()[n] for n in ("status", "handle", "host")] == ["running", "process/1/2", "box"]
    assert operator.post(f"{SESSIONS}/s/resume").json()["reason"] == "illegal_transition"
    assert operator.post(f"{SESSIONS}/s/stop", json={"mode": "soft"}).json()["status"] == "archived"
    assert operator.post(f"{SESSIONS}/s/stop", json={"mode": "hard"}).json()["status"] == "terminated"
    assert operator.post(f"{SESSIONS}/s/resume", json={}).json()["reason"] == "after_terminal"
    assert operator.post(f"{SESSIONS}/t/stop", json={}).status_code == 404
    operator.post(SESSIONS, json={"session": "u"})
    names = [row["session"] for row in operator.get(SESSIONS).json()["sessions"]]
    assert names == ["u", "s"]
    assert operator.get(SESSIONS, params={"state": "terminated"}).json()["total"] == 1
    assert operator.get(f"{SESSIONS}/s").json()["status"] == "terminated"


def test_a_principal_is_added_works_and_is_revoked_for_ever(gateway, operator):
    token = add_principal(operator, "ann", "viewer")
    listed = operator.get(PRINCIPALS)
    assert [(p["principal"], p["role"], p["status"]) for p in listed.json()["principals"]] == [
        ("ann", "viewer", "active")
    ]
    assert "sha256" not in listed.text and token not in listed.text
    with gateway.client(token) as ann:
        assert ann.get(JOBS).status_code == 200
        assert operator.post(f"{PRINCIPALS}/ann/revoke", json={}).json()["status"] == "revoked"
        refused = ann.get(JOBS)
        assert (refused.status_code, refused.json()["message"]) == (401, "the token is revoked")
        assert refused.headers["WWW-Authenticate"].startswith("Bearer")
    again = operator.post(f"{PRINCIPALS}/ann/revoke", json={})
    assert (again.status_code, again.headers["Trunkline-Verdict"]) == (200, "duplicate")
    reused = operator.post(PRINCIPALS, json={"principal": "ann", "role": "viewer"})
    assert (reused.status_code, reused.json()["reason"]) == (409, "seq_conflict")
    assert operator.post(f"{PRINCIPALS}/nobody/revoke", json={}).status_code == 404
    for reserved in ("operator", "reactor", "anonymous"):
        assert operator.post(PRINCIPALS, json={"principal": reserved, "role": "viewer"}).status_code == 400


def test_refusals_are_recorded_with_their_reason_and_rate_limited(gateway, operator, read_topic):
    token = add_principal(operator, "ann", "viewer")
    canary = "canary-token-of-nobody-at-all"
    with gateway.client(canary) as stranger, gateway.client(token) as ann:
        for _ in range(40):
            assert stranger.get(f"{JOBS}/0a1b2c3d", params={"token": canary}).status_code == 401
        assert ann.post(JOBS, json={"description": "x"}).status_code == 403

    def refusals():
        found = [r for r in read_topic() if r.key == b"refused/http"]
        return [json.loads(r.value) for r in found] if len(found) > BURST else None

    bodies = wait_until(refusals, what="the records of the refusals")
    assert len(bodies) == BURST + 1
    assert {(b["reason"], b["principal"], b["route"]) for b in bodies} == {
        ("unauthorized", "anonymous", f"GET {JOBS}/{{job_id}}"),
        ("policy", "ann", f"POST {JOBS}"),
    }
    assert canary not in json.dumps(bodies) and canary not in gateway.program.log()


def test_a_refusal_is_settled_with_its_own_reason(gateway, operator):
    from tests.connectors.doors.http_api.hub_access import server_events

    with operator.stream("GET", "/api/hub/events", params={"kind": "refused"}) as answer:
        events = server_events(answer)
        next(events)
        with gateway.client("") as stranger:
            stranger.get(JOBS)
        settled = next(events).data
    assert [settled[n] for n in ("stream", "verdict", "reason", "principal")] == [
        "refused/http",
        "rejected",
        "unauthorized",
        "http/anonymous",
    ]


def test_the_operators_token_file_is_for_its_owner_alone(gateway):
    assert stat.S_IMODE(gateway.settings.operator_token_file.stat().st_mode) == 0o600
    assert len(gateway.operator_token) == 43


def test_a_delegator_finds_in_its_mailbox_that_its_job_has_ended(gateway, operator):
    with gateway.client(add_principal(operator, "ann", "delegator")) as ann:
        job = register(ann)
        ann.post(f"{JOBS}/{job['job_id']}/cancel", json={})
        found = wait_until(
            lambda: ann.get("/api/hub/mailboxes/default/ann").json()["messages"], what="the reactor's message"
        )
    assert [(m["kind"], m["recipient"]) for m in found] == [("job.cancelled", "ann")]
    assert found[0]["posted_at"].endswith("Z")
