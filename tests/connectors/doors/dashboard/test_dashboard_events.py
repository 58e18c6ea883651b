"""The live events: what they tell, whom, and that who comes again gets exactly what it missed."""

from __future__ import annotations

import socket

import psutil
import pytest

from connectors.doors.dashboard.event_broadcast import RESUME_RECORDS, LogPosition, parsed_position
from connectors.doors.dashboard.past_records import job_history, records_between, rejected_before
from connectors.hub.live.live_view import LiveView
from schemas.keys.sealing import job_secret_purpose
from schemas.streams.job.job_registry import JobRegistration
from schemas.streams.refused.refusal import REQUEST_REFUSED
from schemas.streams.task.task_registry import TaskCancellation, TaskCreation
from tests.broker_processes import LOOPBACK, wait_until
from tests.connectors.doors.dashboard.event_reading import EVENTS, Seen, followed
from tests.connectors.doors.dashboard.scene import append, event, joined, message, stopped, updated
from tests.connectors.doors.http_api.hub_access import JOBS, add_principal, register
from tests.connectors.ledger_tables import LedgerTable, settings_below


def _created(task_id):
    body = TaskCreation(task_id=task_id, request_id="q1", description="count the stars", agent_name="nova")
    return body.record(door="http", principal="operator")


@pytest.mark.requirement("AM-11")
def test_agents_jobs_tasks_messages_and_verdicts_are_told_as_they_change(operator, watcher, publisher):
    with followed(watcher) as events:
        seen = Seen(events).until(lambda s: s.names() == ["hello"])
        job = register(operator)
        append(publisher, [joined("nova", "counts stars", ["count"]), updated("nova", "working")])
        append(publisher, [message("operator", "nova", "the secret of the stars", "high"), _created("t1")])
        append(publisher, [event({**job, "secret": "forged"}, 1, "started", "x"), stopped("nova", "done")])
        seen.until(
            lambda s: (
                len(s.told_jobs()) >= 2
                and s.of("task")
                and s.of("message")
                and any(agent.get("status") == "stopped" for agent in s.of("agent:removed"))
            )
        )
    agents = [(a["agent"], a["status"], a["task"]) for a in seen.of("agent:removed") if a["key"] == "nova"]
    assert agents[-1] == ("nova", "stopped", "counts stars")
    assert {j["job_id"]: (j["status"], j["description"]) for j in seen.of("job")} == {
        job["job_id"]: ("pending", "build the docs")
    }
    assert seen.of("task")[-1]["status"] == "pending" and seen.of("task")[-1]["task_id"] == "t1"
    (told,) = [m for m in seen.of("message") if m["type"] == "message.posted" and m["to"] == "nova"]
    assert (told["from"], told["priority"], told["kind"]) == ("operator", "high", "message")
    assert "stars" not in str(seen.of("message"))
    rejected = [v for v in seen.of("verdict") if v["verdict"] == "rejected"]
    assert [(v["stream"], v["reason"]) for v in rejected] == [(f"job/{job['job_id']}", "bad_signature")]


@pytest.mark.requirement("AM-06")
def test_each_change_of_an_agent_is_an_event_of_its_own_name(watcher, publisher):
    with followed(watcher) as events:
        seen = Seen(events).until(lambda s: s.names() == ["hello"])
        for record, name, status in (
            (joined("ivy", "counts"), "agent:created", "initializing"),
            (updated("ivy", "working"), "agent:updated", "working"),
            (stopped("ivy", "done"), "agent:removed", "stopped"),
        ):
            append(publisher, [record])
            seen.until(lambda s, name=name: s.of(name))
            assert [(row["agent"], row["status"]) for row in seen.of(name)] == [("ivy", status)]
    assert "agent" not in seen.names()


@pytest.mark.requirement("AM-11")
def test_agents_are_participants_first_and_then_those_who_work_on_a_task(watcher, publisher):
    append(publisher, [joined("zoe", "z"), joined("ann", "a"), updated("zoe", "idle"), joined("old", "o")])
    append(publisher, [stopped("old", "done")])

    def found():
        rows = watcher.get("/api/agents").json()["agents"]
        return [(row["agent"], row["status"]) for row in rows]

    expected = [("ann", "initializing"), ("zoe", "idle"), ("old", "stopped")]
    wait_until(lambda: found() == expected, what="agents")


def test_an_event_is_told_once_at_rest_and_each_frame_has_one_id(operator, watcher):
    with followed(watcher) as events:
        seen = Seen(events).until(lambda s: s.events)
        jobs = [register(operator)["job_id"] for _ in range(20)]
        seen.until(lambda s: len(s.told_jobs()) >= 20)
    assert seen.told_jobs() == jobs
    assert len(set(seen.positions)) == len(seen.positions)
    assert all((event.id is None) == (event.name not in ("hello", "verdict")) for event in seen.events)


@pytest.mark.requirement("AM-11")
@pytest.mark.parametrize("where", ["here", "at another gateway", "after a restart"])
def test_who_comes_again_gets_what_it_missed_without_a_gap(start_dashboard, where):
    first = start_dashboard()
    with first.client() as operator, first.watcher() as watcher:
        with followed(watcher) as events:
            seen = Seen(events).until(lambda s: s.events)
            register(operator)
            seen.until(lambda s: s.told_jobs())
        missed = [register(operator)["job_id"] for _ in range(300)]
    second = first if where == "here" else start_dashboard()
    if where == "after a restart":
        assert first.program.stop() == 0
    with second.client() as operator, second.watcher() as watcher, followed(watcher, seen.last_id) as events:
        again = Seen(events).until(lambda s: len(s.told_jobs()) >= 300)
        after = register(operator)["job_id"]
        again.until(lambda s: len(s.told_jobs()) > 300)
    assert set(again.names()) == {"job", "verdict"}
    told = again.told_jobs()
    assert sorted(told[:300]) == sorted(missed) and told[300:] == [after]
    assert {job["job_id"] for job in again.of("job")} == {*missed, after}


@pytest.mark.requirement("AM-11")
def test_where_too_much_was_missed_or_the_place_is_unknown_a_reset_says_so(
    dashboard, operator, watcher, keyring
):
    with followed(watcher) as events:
        old = Seen(events).until(lambda s: s.events).last_id
    offsets = parsed_position(old, 1, 4).offsets
    beyond = str(LogPosition(1, {**offsets, 0: offsets[0] + 1_000_000}))
    for place in ("nonsense", "e7:0.0.0.0", "e1:0.0", "e1:-1.0.0.0", beyond, "e1:" + "9" * 400):
        with followed(watcher, place) as events:
            seen = Seen(events).until(lambda s: s.events)
            assert seen.names() == ["reset"], place
            job = register(operator)
            seen.until(lambda s: s.told_jobs())
            assert [j["job_id"] for j in seen.of("job")] == [job["job_id"]], place
    assert "after" not in watcher.get("/api/snapshot").json()["position"]


def test_more_than_is_looked_up_is_a_reset_and_a_snapshot_has_it_all(
    start_dashboard, watcher, publisher, keyring
):
    with followed(watcher) as events:
        old = Seen(events).until(lambda s: s.events).last_id
    count = RESUME_RECORDS + 10
    append(
        publisher,
        (
            JobRegistration(
                sealed_secret=keyring.seal(b"s", job_secret_purpose(f"{n:08x}")),
                job_id=f"{n:08x}",
                description="a job",
            ).record(door="cli", principal="operator")
            for n in range(count)
        ),
    )
    wait_until(lambda: watcher.get("/api/snapshot").json()["jobs"].get("pending") == count, what="jobs")
    with start_dashboard().watcher() as elsewhere, followed(elsewhere, old) as events:
        assert Seen(events).until(lambda s: s.events).names() == ["reset"]
    found, after = set(), None
    while True:
        page = watcher.get("/api/jobs", params={} if after is None else {"after": after}).json()
        found |= {job["job_id"] for job in page["jobs"]}
        after = page["next"]
        if after is None:
            break
    assert len(found) == count


def test_a_viewer_follows_all_but_tokens_and_sees_no_bodies_of_messages(
    dashboard, operator, watcher, publisher
):
    ann = dashboard.watcher(add_principal(operator, "ann", "viewer"))
    with ann, followed(ann) as shown, followed(watcher) as all_:
        public, whole = Seen(shown).until(lambda s: s.events), Seen(all_).until(lambda s: s.events)
        add_principal(operator, "bo", "worker")
        append(publisher, [message("operator", "nova", "hello")])
        for seen in (public, whole):
            seen.until(lambda s: s.of("message"))
        whole.until(lambda s: [v for v in s.of("verdict") if v["stream"] == "principal/bo"])
        mail = next(v for v in whole.of("verdict") if v["stream"].startswith("mailbox/"))
        where = "/api/records/{}/{}".format(*mail["position"])
        assert watcher.get(where).json()["body"]["to"] == "nova"
        assert ann.get(where).json()["body"] is None
        token = next(v for v in whole.of("verdict") if v["stream"] == "principal/bo")
        assert ann.get("/api/records/{}/{}".format(*token["position"])).status_code == 404
    kinds = {v["stream"].partition("/")[0] for v in public.of("verdict")}
    assert "mailbox" in kinds and "principal" not in kinds


@pytest.mark.requirement("AM-11")
def test_readers_that_do_not_read_are_dropped_and_nobody_waits_for_them(dashboard, watcher, publisher, keyring):
    port = dashboard.settings.dashboard.port
    gateway = psutil.Process(dashboard.program.process.pid)

    def connections():
        found = gateway.net_connections(kind="tcp")
        return [c for c in found if c.laddr.port == port and c.status == "ESTABLISHED"]

    lines = (f"GET {EVENTS} HTTP/1.1", f"Host: {LOOPBACK}:{port}")
    ask = "\r\n".join((*lines, f"Authorization: Bearer {dashboard.operator_token}", "", "")).encode()
    silent = []
    for _ in range(5):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((LOOPBACK, port))
        one.sendall(ask)
        silent.append(one)
    with followed(watcher) as events:
        seen = Seen(events).until(lambda s: s.events)
        wait_until(lambda: len(connections()) >= 6, what="all readers are there")
        records = [
            JobRegistration(
                sealed_secret=keyring.seal(b"s", job_secret_purpose(f"{n:08x}")),
                job_id=f"{n:08x}",
                description="a job " * 50,
            ).record(door="cli", principal="operator")
            for n in range(4000)
        ]
        append(publisher, records)
        seen.until(lambda s: len(s.told_jobs()) >= 4000)
        before = gateway.memory_info().rss
        wait_until(lambda: len(connections()) <= 1, 30, "the silent ones are dropped")
        assert gateway.memory_info().rss - before < 20 * 2**20
        # Its events go to the readers, as before.
        append(
            publisher,
            [
                JobRegistration(
                    sealed_secret=keyring.seal(b"s", job_secret_purpose("ffffffff")),
                    job_id="ffffffff",
                    description="a job",
                ).record(door="cli", principal="operator")
            ],
        )
        seen.until(lambda s: len(s.told_jobs()) > 4000)
    for one in silent:
        one.close()


def test_missed_records_a_jobs_history_and_old_rejections_come_from_the_ledger(tmp_path, keyring):
    settings = settings_below(tmp_path)
    view = LiveView(settings, keyring)
    assert records_between(settings, {0: (0, 9)}) == []
    assert job_history(settings, view, "0a0a0a0a", None) == ([], False)
    assert rejected_before(settings, {0: 9}) == {}
    table = LedgerTable(settings)
    rows = [table.registered("0a0a0a0a"), *(table.event("0a0a0a0a", n, f"step {n}") for n in (1, 2))]
    table.commit(*rows, table.event("0a0a0a0a", 2, "another step 2"))
    table.commit(table.registered("0b0b0b0b"), table.message("job/0b0b0b0b", b"no json"))
    assert [r.position.offset for r in records_between(settings, {0: (1, 3), 1: (0, 9)})] == [1, 2]
    history, is_cut = job_history(settings, view, "0a0a0a0a", None)
    assert [record.position.offset for record in history] == [0, 1, 2, 3] and not is_cut
    assert [r.position.offset for r in job_history(settings, view, "0a0a0a0a", 1)[0]] == [2, 3]
    assert rejected_before(settings, {0: 6}) == {"seq_conflict": 1, "malformed": 1}
    assert rejected_before(settings, {0: 5}) == {"seq_conflict": 1}


def test_a_refused_request_is_a_rejection_with_its_event_behind_it(dashboard, operator, watcher):
    with dashboard.client("x" * 43) as stranger:
        assert stranger.get(JOBS).status_code == 401

    def refused():
        found = watcher.get("/api/rejections", params={"reason": "unauthorized"}).json()
        return found["events"] and found

    found = wait_until(refused, what="the refusal")
    (event_,) = found["events"]
    assert {"reason": "unauthorized", "count": 1, "last_ms": event_["logged_ms"]} in found["reasons"]
    assert (event_["type"], event_["stream"]) == (REQUEST_REFUSED, "refused/http")
    shown = watcher.get("/api/records/{}/{}".format(*event_["position"])).json()
    assert shown["body"]["route"] == f"GET {JOBS}"


def test_a_task_that_ends_takes_its_agent_off_the_list(watcher, publisher):
    with followed(watcher) as events:
        seen = Seen(events).until(lambda s: s.events)
        body = TaskCancellation(task_id="t9", request_id="q2", reason="not needed")
        append(publisher, [_created("t9"), body.record(door="http", principal="operator")])
        seen.until(lambda s: [t for t in s.of("task") if t["status"] == "cancelled"])
    assert seen.of("agent:removed")[-1] == {"key": "task:t9", "gone": True}
