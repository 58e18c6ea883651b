"""Following along: snapshot, settled events, resuming after a lost connection, gaps, verdicts by line."""

from __future__ import annotations

import asyncio
import itertools
import json

import msgspec
import pytest

from connectors.hub.live.settled_feed import SettledFeed, SettledRecord
from connectors.hub.services.settled_stream import EventWriter, Follower, Wanted, server_events
from connectors.hub.serving import streaming_answer
from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.policy import Caller
from connectors.hub.serving.shares import ByteBudget
from connectors.hub.serving.streaming_answer import CHUNK_BYTES, EVENT_STREAM, StreamPlaces
from schemas.streams.agents.agent_registry import AgentUpdated
from schemas.streams.job.job_registry import JOB_EVENT
from schemas.wire.record import OutgoingRecord, Position
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import JOBS, SESSIONS, add_principal, register
from tests.connectors.doors.http_api.hub_access import server_events as events_of
from tests.schemas.job_records import signed
from trunkline_agent.mcp.signing import new_key_pair
from trunkline_agent.wire.ids import content_id

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
        publisher.append(update.record(door="mcp", principal="ivy")).result(10)
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


async def reserve(size: int) -> None:
    """Takes no memory."""


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
            reserve,
        )
        names = [(await anext(stream)).split(b"\n")[0]]
        feed.extend(_records(50))
        names += [chunk.split(b"\n")[0] async for chunk in stream]
        return names

    assert asyncio.run(follow()) == [b"event: snapshot", b"event: gap"]


@pytest.mark.requirement("LM-22")
def test_a_client_that_does_not_read_is_cut_off_and_its_place_given_back():
    asked, cut = [], []
    budget = ByteBudget(1 << 20)
    places = StreamPlaces(budget, 64, 1, unread_s=0.05, on_unread=lambda: cut.append(1))

    async def chunks(reserve):
        for number in itertools.count():
            asked.append(number)
            await reserve(200_000)
            yield b"x" * 200_000

    async def serve(answer):
        stuck, never, sent = asyncio.Event(), asyncio.Event(), []

        async def send(message):
            if message.get("body"):
                sent.append(len(message["body"]))
                if len(sent) > 1:
                    await stuck.wait()

        async def receive():
            await never.wait()

        await asyncio.wait_for(answer({}, receive, send), 5)
        assert sent == [CHUNK_BYTES] * 2  # a slow client does not get a long event in one piece

    answer = places.answer(Caller("ann", "worker"), chunks, "text/plain")
    with pytest.raises(ApiError) as refused:
        places.answer(Caller("ann", "worker"), chunks, "text/plain")
    assert refused.value.status_code == 503
    asyncio.run(serve(answer))
    assert (asked, cut, budget.used) == ([0], [1], 0)
    places.answer(Caller("ann", "worker"), chunks, "text/plain")


@pytest.mark.requirement("LM-22")
def test_a_client_that_does_not_read_is_cut_off_earlier_while_others_wait_for_its_memory(monkeypatch):
    monkeypatch.setattr(streaming_answer, "_CROWDED_S", 0.2)
    monkeypatch.setattr(streaming_answer, "_CHECK_S", 0.02)
    budget = ByteBudget(1 << 20)
    places, never = StreamPlaces(budget, 64, unread_s=60.0), asyncio.Event()

    async def chunks(reserve):
        await reserve(600_000)
        yield b"x" * 600_000

    async def stuck(message):
        if message.get("body"):
            await never.wait()

    async def receive():
        await never.wait()

    async def serve():
        slow = asyncio.create_task(
            places.answer(Caller("ann", "worker"), chunks, "text/plain")({}, receive, stuck)
        )
        async with asyncio.timeout(5):
            while not budget.used:
                await asyncio.sleep(0)
        assert not (await asyncio.wait({slow}, timeout=0.4))[0]  # nobody waits
        sent = []

        async def send(message):
            sent.append(len(message.get("body", b"")))

        await asyncio.wait_for(
            places.answer(Caller("bo", "worker"), chunks, "text/plain")({}, receive, send), 5
        )
        assert sum(sent) == 600_000
        await asyncio.wait_for(slow, 5)
        assert (budget.used, budget.waiting) == (0, 0)

    asyncio.run(serve())


@pytest.mark.requirement("LM-22")
def test_a_stream_without_memory_for_its_next_event_ends_with_the_reason(monkeypatch):
    monkeypatch.setattr(streaming_answer, "_ROOM_WAIT_S", 0.05)
    budget = ByteBudget(1 << 20)

    async def chunks(reserve):
        await reserve(600_000)
        yield b"never"

    async def serve():
        assert await budget.take("bo", 1_000_000, 1.0)
        sent, never = [], asyncio.Event()

        async def send(message):
            sent.append(message)

        answer = StreamPlaces(budget, 64).answer(Caller("ann", "worker"), chunks, EVENT_STREAM)
        await asyncio.wait_for(answer({}, never.wait, send), 5)
        assert b"come back with Last-Event-ID" in sent[1]["body"]
        assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(serve())


@pytest.mark.requirement("LM-22")
def test_a_batch_of_a_feed_has_one_long_record_or_several_short_ones():
    feed = SettledFeed()
    long, short = (msgspec.structs.replace(_records(1)[0], value=b"x" * size) for size in (100_000, 10_000))
    feed.extend([short, short, long, long, short])
    found, cursor = [], 0
    while cursor < feed.newest:
        records, cursor = feed.since(cursor, 200, CHUNK_BYTES)
        found.append([len(record.value) for record in records])
    assert found == [[10_000, 10_000], [100_000], [100_000], [10_000]]


def test_places_are_given_back_when_followers_leave(operator):
    for _ in range(300):
        with operator.stream("GET", "/api/hub/verdicts") as answer:
            assert answer.status_code == 200
    wait_until(lambda: operator.get("/healthz").is_success, what="the gateway")
