"""Following along: snapshot, settled events, resuming after a lost connection, gaps, verdicts by line."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from connectors.gateway.feed.settled_stream import EventWriter, Follower, Wanted, server_events
from connectors.gateway.web.streaming_answer import StreamingAnswer, StreamPlaces
from connectors.live.settled_feed import SettledFeed, SettledRecord
from connectors.log.publisher import Position
from schemas.streams.agents.participants import AgentUpdated, participant_record
from schemas.streams.job.job_event import JOB_EVENT
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import wait_until
from tests.connectors.gateway.hub_access import JOBS, SESSIONS, add_principal, register
from tests.connectors.gateway.hub_access import server_events as events_of
from tests.schemas.job_records import signed
from trunkline_agent.mcp.signing import new_key_pair
from trunkline_agent.wire.content_id import content_id

EVENTS = "/api/hub/events"


def job_event(job, seq, event, detail="ok"):
    body = signed(seq, event, job["secret"], job_id=job["job_id"], detail=detail)
    value = json.dumps(body).encode()
    stream = f"job/{job['job_id']}"
    return OutgoingRecord(stream, content_id(value), "mqtt", "unverified", JOB_EVENT, value)


@pytest.mark.requirement("JE-12")
def test_a_follower_of_a_job_gets_its_row_and_then_what_is_settled(operator, publisher):
    job = register(operator)
    register(operator)
    with operator.stream("GET", f"{JOBS}/{job['job_id']}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer)
        first = next(events)
        assert (first.name, first.data["row"]["status"]) == ("snapshot", "pending")
        operator.post(f"{JOBS}/pick", json={"session": "s"})
        publisher.append(job_event(job, 1, "started")).result(10)
        publisher.append(job_event(job, 1, "started", "forged")).result(10)
        picked, started, conflict = itertools.islice(events, 3)
    assert {e.data["stream"] for e in (picked, started, conflict)} == {f"job/{job['job_id']}"}
    assert (picked.data["type"], picked.data["principal"]) == ("job.picked", "http/operator")
    assert (started.data["verdict"], started.data["seq"], started.data["status_after"]) == (
        "accepted",
        1,
        "running",
    )
    assert started.data["body"]["detail"] == "ok" and started.data["logged_at"].endswith("Z")
    assert (conflict.data["verdict"], conflict.data["reason"]) == ("rejected", "seq_conflict")


@pytest.mark.requirement("CM-05")
def test_a_follower_of_everything_sees_what_its_role_may_see_and_no_sealed_secret(gateway, operator):
    token = add_principal(operator, "ann", "viewer")
    with (
        gateway.client(token) as ann,
        ann.stream("GET", EVENTS) as shown,
        operator.stream("GET", EVENTS) as all_,
    ):
        public, whole = events_of(shown), events_of(all_)
        assert next(public).data["rows"] == {"registry_jobs": [], "registry_sessions": []}
        assert next(whole).name == "snapshot"
        add_principal(operator, "bo", "worker")
        job = register(operator, broker={"host": "h", "password": "canary"})
        seen, added, registered = next(public), next(whole), next(whole)
    assert seen.data == registered.data
    assert registered.data["stream"] == f"job/{job['job_id']}"
    assert set(registered.data["body"]["broker"]) >= {"host"}
    assert added.data["body"] == {"schema_version": 1, "principal": "bo", "role": "worker"}
    for event in (registered, added):
        assert "sealed" not in json.dumps(event.data) and "sha256" not in json.dumps(event.data)


@pytest.mark.requirement("AM-06")
def test_each_change_of_the_registry_of_agents_is_an_event_of_its_own_name(operator, publisher):
    participants = "/api/hub/participants"
    with operator.stream("GET", EVENTS, params={"kind": "agent", "verdict": "accepted"}) as answer:
        events = events_of(answer)
        assert next(events).name == "snapshot"
        body = {"agent_name": "ivy", "public_key": new_key_pair()[1], "task": "counts", "capabilities": ["add"]}
        assert operator.post(participants, json=body).status_code == 201
        update = AgentUpdated(agent_name="ivy", request_id="q1", status="working")
        publisher.append(participant_record(update, door="mcp", principal="ivy")).result(10)
        assert operator.post(f"{participants}/ivy/stop", json={"reason": "done"}).status_code == 200
        ours = (one for one in events if "ivy" in str(one.data))
        found = [(one.name, one.data) for one in itertools.islice(ours, 6)]
    assert [name for name, _ in found[::2]] == ["agent:created", "agent:updated", "agent:removed"]
    assert [data["id"] for _, data in found[::2]] == ["ivy"] * 3
    assert found[-2][1]["status"] == "stopped" and found[-2][1]["task"] == "counts"
    settled = [(name, data["type"]) for name, data in found[1::2]]
    assert settled == [("settled", f"agent.{kind}") for kind in ("joined", "updated", "stopped")]


def test_filters_choose_by_stream_kind_type_and_verdict(operator):
    job = register(operator)
    queries = (
        {"kind": "session"},
        {"type": "job.cancelled", "verdict": "accepted"},
        {"verdict": "rejected"},
        {"stream": "session/s"},
    )
    wanted = ["session.created", "job.cancelled", "job.cancelled", "session.created"]
    for query, expected in zip(queries, wanted, strict=True):
        with operator.stream("GET", EVENTS, params=query) as answer:
            events = events_of(answer)
            assert next(events).name == "snapshot"
            register(operator)
            if "session" in str(query):
                operator.post(SESSIONS, json={"session": "s"})
            operator.post(f"{JOBS}/{job['job_id']}/cancel", json={})
            found = next(events)
            assert found.data["type"] == expected, query
            job = register(operator) if query != queries[1] else job
    for wrong in ({"kind": "JOB"}, {"stream": "job"}, {"verdict": "maybe"}, {"what": "x"}):
        assert operator.get(EVENTS, params=wrong).status_code == 400


def test_a_follower_that_comes_again_gets_exactly_what_it_missed(operator):
    with operator.stream("GET", EVENTS) as answer:
        events = events_of(answer)
        next(events)
        register(operator)
        seen = next(events)
    missed = [register(operator)["job_id"] for _ in range(3)]
    with operator.stream("GET", EVENTS, headers={"Last-Event-ID": seen.id}) as answer:
        again = list(itertools.islice(events_of(answer), 3))
    assert [event.name for event in again] == ["settled"] * 3
    assert [event.data["stream"] for event in again] == [f"job/{job_id}" for job_id in missed]


def test_after_a_restart_a_follower_gets_a_gap_and_a_snapshot(start_gateway):
    gateway = start_gateway()
    with gateway.client() as operator:
        job = register(operator)
        with operator.stream("GET", EVENTS) as answer:
            first = next(events_of(answer))
    assert gateway.program.stop() == 0
    with start_gateway().client() as operator:
        for stale in (first.id, "nonsense", f"{first.id[:-1]}999999"):
            with operator.stream("GET", EVENTS, headers={"Last-Event-ID": stale}) as answer:
                gap, snapshot = itertools.islice(events_of(answer), 2)
            assert (gap.name, snapshot.name) == ("gap", "snapshot")
            assert [row["job_id"] for row in snapshot.data["rows"]["registry_jobs"]] == [job["job_id"]]


def test_a_stream_ends_when_its_token_is_revoked_and_when_the_gateway_stops(gateway, operator):
    token = add_principal(operator, "ann", "viewer")
    with gateway.client(token) as ann, ann.stream("GET", EVENTS) as answer:
        events = events_of(answer)
        next(events)
        operator.post("/api/hub/principals/ann/revoke", json={})
        assert list(events) == []
    with operator.stream("GET", EVENTS) as answer:
        events = events_of(answer)
        next(events)
        assert gateway.program.stop() == 0
        assert list(events) == []


@pytest.mark.requirement("JE-17")
def test_verdicts_on_job_events_come_by_line_and_a_line_at_least_every_second(operator, publisher):
    job = register(operator)
    with operator.stream("GET", "/api/hub/verdicts") as answer:
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = (json.loads(line) for line in answer.iter_lines())
        assert next(lines) == {}
        register(operator)
        where = [
            publisher.append(job_event(job, 1, "started")).result(10),
            publisher.append(job_event(job, 1, "started", "forged")).result(10),
        ]
        found = []
        while len(found) < 2:
            found += next(lines).get("settled", [])
        assert found == [[*where[0], "accepted", None], [*where[1], "rejected", "seq_conflict"]]
        assert {} in (next(lines), next(lines))


def _records(count):
    return [
        SettledRecord(
            Position(0, n),
            "job/00000000",
            "job.event",
            "x",
            "mqtt/u",
            "accepted",
            None,
            None,
            False,
            "running",
            n,
            n,
            b"{}",
        )
        for n in range(count)
    ]


def test_what_comes_right_after_what_a_follower_was_told_comes_together():
    async def follow():
        feed, records = SettledFeed(), _records(4)
        stream = Follower(feed, lambda: True).batches(0, 60, together_s=0.5)
        following = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)  # it waits
        feed.extend(records[:1])
        told = [await following]
        following = asyncio.create_task(anext(stream))
        for record in records[1:]:
            feed.extend([record])
            for _ in range(10):
                await asyncio.sleep(0)  # long enough for who is woken by each
        told.append(await following)
        return [(cursor, len(found)) for cursor, found in told]

    assert asyncio.run(follow()) == [(0, 1), (1, 3)]


def test_a_follower_that_falls_behind_is_told_of_the_gap_and_let_go():
    async def follow():
        feed = SettledFeed(limit_records=10)
        stream = server_events(
            EventWriter("boot", lambda name: None),
            Follower(feed, lambda: True),
            Wanted(),
            None,
            lambda: {"rows": {}},
        )
        names = [(await anext(stream)).split(b"\n")[0]]
        feed.extend(_records(50))
        names += [chunk.split(b"\n")[0] async for chunk in stream]
        return names

    assert asyncio.run(follow()) == [b"event: snapshot", b"event: gap"]


def test_a_client_that_does_not_read_is_cut_off_and_its_place_given_back():
    places, asked = StreamPlaces(3, share=1), []

    async def chunks():
        for number in itertools.count():
            asked.append(number)
            yield b"x"

    async def serve():
        stuck, never = asyncio.Event(), asyncio.Event()

        async def send(message):
            if message.get("body"):
                await stuck.wait()

        async def receive():
            await never.wait()

        answer = StreamingAnswer(chunks, "text/plain", lambda: places.give_back("ann"), 0.05)
        await asyncio.wait_for(answer({}, receive, send), 5)

    assert places.take("ann") and not places.take("ann")
    assert places.take("bo") and places.take("cy") and not places.take("di")
    asyncio.run(serve())
    assert asked == [0]
    assert places.take("ann")


def test_places_are_given_back_when_followers_leave(operator):
    for _ in range(300):
        with operator.stream("GET", "/api/hub/verdicts") as answer:
            assert answer.status_code == 200
    wait_until(lambda: operator.get("/healthz").is_success, what="the gateway")
