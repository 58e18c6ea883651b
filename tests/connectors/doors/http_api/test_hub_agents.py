"""The agents of the hub: what stands in their files is shown, followed when it changes, never half taken."""

from __future__ import annotations

import json

import psutil
import pytest

from connectors.hub.serving.answers import ApiError, check_task_text
from schemas.settings.settings import PROJECT_ROOT, LimitSettings
from schemas.wire.wire_body import TASK_TEXT_LIMIT
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import AGENTS, MESSAGES, TASKS, processes_of, write_agent

pytestmark = pytest.mark.requirement("HH-01")

FIELDS = ("name", "image", "description", "capabilities", "hardened")
GOOD = {"image": "test/idle", "description": "d", "capabilities": ["a"], "hardened": False}


def shown(client, name):
    """The agent's own fields as a gateway shows them, None for one that is not there or was removed."""
    answer = client.get(f"{AGENTS}/{name}")
    if answer.status_code == 404 or answer.json().get("status") == "removed":
        return None
    return {field: answer.json()[field] for field in FIELDS}


def faults(client):
    """Return the faults of invalid files, by file name."""
    return client.get(AGENTS).json()["faults"]


def wait_shown(hub, name, expected):
    """Wait until both gateways show this of an agent."""
    for client in (hub.operator, hub.other):
        wait_until(lambda client=client: shown(client, name) == expected, 10, f"{name} is {expected}")


def test_both_gateways_show_each_definition_of_the_folder_as_it_is_written(hub):
    for client in (hub.operator, hub.other):
        listed = {agent["name"]: agent for agent in hub.agents(client)}
        for name in ("echo", "flaky"):
            written = json.loads((PROJECT_ROOT / "conf" / "agents" / f"{name}.json").read_text())
            assert {field: listed[name][field] for field in FIELDS} == written
            assert client.get(f"{AGENTS}/{name}").json() == listed[name]
        assert (listed["idle"]["capabilities"], listed["lazy"]["capabilities"]) == (["wait", "rest"], [])
        assert listed["lazy"]["hardened"] is False
        assert [agent["name"] for agent in hub.agents(client)] == sorted(listed)


def test_a_file_that_comes_changes_and_goes_is_followed(hub):
    folder = hub.settings.gateway.agents_dir
    file = write_agent(folder, "late", **GOOD)
    wait_shown(hub, "late", {"name": "late", **GOOD})
    task = hub.submit("late")
    changed = {"image": "test/nobody", "description": "other", "capabilities": ["b", "c"], "hardened": True}
    write_agent(folder, "late", **changed)
    wait_shown(hub, "late", {"name": "late", **changed})
    # The capabilities of an issued token stay.
    assert hub.token_of(task.id)["capabilities"] == ["a"]
    hub.operator.post(f"{TASKS}/{task.id}/cancel", json={})
    file.unlink()
    wait_shown(hub, "late", None)
    for client in (hub.operator, hub.other):
        refused = client.post(TASKS, json={"agent_name": "late", "description": "x"})
        assert refused.status_code == 404
        refused = client.post(MESSAGES, json={"recipient": "late", "type": "x", "payload": None})
        assert (refused.status_code, refused.json()["reason"]) == (404, "unknown_recipient")
    write_agent(folder, "late", **GOOD)
    wait_shown(hub, "late", {"name": "late", **GOOD})
    file.unlink()
    wait_shown(hub, "late", None)


BAD = {
    "no-json": b'{"name": "no-json", "image": "test/idle"',
    "not-an-object": b'["not-an-object"]',
    "key-twice": b'{"name": "key-twice", "image": "a", "image": "b"}',
    "nan": b'{"name": "nan", "image": "test/idle", "description": NaN}',
    "surrogate": b'{"name": "surrogate", "image": "test/idle", "description": "\\ud800"}',
    "no-utf8": b'{"name": "no-utf8", "image": "test/idle", "description": "\xff"}',
    "unknown-key": b'{"name": "unknown-key", "image": "test/idle", "hardend": true}',
    "no-image": b'{"name": "no-image"}',
    "no-name": b'{"image": "test/idle"}',
    "bad-name": b'{"name": "../bad-name", "image": "test/idle"}',
    "hardened-text": b'{"name": "hardened-text", "image": "test/idle", "hardened": "yes"}',
    "capability-text": b'{"name": "capability-text", "image": "test/idle", "capabilities": "all"}',
    "empty": b"",
    "is-the-hub": b'{"name": "hub", "image": "test/idle"}',
    "idle-again": b'{"name": "idle", "image": "test/broken"}',
}


def test_bad_files_are_told_by_their_names_and_skipped_whole_while_good_ones_are_taken(hub):
    folder = hub.settings.gateway.agents_dir
    before = shown(hub.operator, "idle")
    turning = write_agent(folder, "turning", **GOOD)
    wait_shown(hub, "turning", {"name": "turning", **GOOD})
    files = [folder / f"{name}.json" for name in BAD]
    try:
        for file, content in zip(files, BAD.values(), strict=True):
            file.write_bytes(content)
        turning.write_bytes(b'{"name": "turning", "image": "test/broken", "hardened": 1}')
        good = write_agent(folder, "beside-them", **GOOD)
        names = {f"{name}.json" for name in (*BAD, "turning")}
        for client in (hub.operator, hub.other):
            wait_until(lambda client=client: names <= faults(client).keys(), 10, "all bad files are told")
            assert all(faults(client).values())
        wait_shown(hub, "beside-them", {"name": "beside-them", **GOOD})
        for client in (hub.operator, hub.other):
            listed = {agent["name"] for agent in hub.agents(client)}
            assert not listed & (set(BAD) | {"hub", "../bad-name"})
            # The earlier definition stays, and nothing of the invalid file was taken.
            assert shown(client, "turning") == {"name": "turning", **GOOD}
            assert shown(client, "idle") == before
    finally:
        for file in files:
            file.unlink(missing_ok=True)
    write_agent(folder, "turning", **{**GOOD, "description": "repaired"})
    wait_shown(hub, "turning", {"name": "turning", **GOOD, "description": "repaired"})
    for client in (hub.operator, hub.other):
        wait_until(lambda client=client: not faults(client), 10, "no fault is left")
    turning.unlink()
    good.unlink()
    wait_shown(hub, "turning", None)
    wait_shown(hub, "beside-them", None)


@pytest.mark.requirement("HH-09")
def test_no_agent_bears_the_name_of_a_principal_of_our_own(hub):
    # The holder of its task's token would read the operator's mail and appear as the operator in the log.
    names = ("operator", "reactor", "anonymous")
    files = [write_agent(hub.settings.gateway.agents_dir, name, **GOOD) for name in names]
    try:
        told = {file.name for file in files}
        read = told | set(names)
        wait_until(
            lambda: (
                read & (faults(hub.operator).keys() | {agent["name"] for agent in hub.agents(hub.operator)})
            ),
            10,
            "the files are read",
        )
        assert told <= faults(hub.operator).keys()
    finally:
        for file in files:
            file.unlink()


@pytest.mark.requirement("HH-11")
def test_a_running_task_names_the_container_that_it_runs_in(hub):
    task = hub.submit("idle", key="named")
    container = hub.container_of(task.id)
    assert task.answer["task"]["session_name"] == f"task-{task.id}"
    assert hub.task(task.id)["session_name"] == container["container_name"] == container["session_name"]
    again = hub.submit("idle", key="named", at=hub.other)
    assert again.answer["task"]["session_name"] == f"task-{task.id}"
    assert hub.operator.post(f"{TASKS}/{task.id}/cancel", json={}).json()["session_name"] == f"task-{task.id}"


@pytest.mark.requirement("AM-09")
def test_a_task_of_32000_characters_reaches_a_spawned_agent_whole_and_a_longer_one_is_refused(hub):
    longest = "\U0001f642" * 32_000  # four bytes each: the most that one variable of an environment must hold
    path = "/api/hub/participants"
    spawned = hub.operator.post(f"{path}/spawn", json={"agent_name": "patient", "task": longest})
    assert (spawned.status_code, spawned.json()["task"]) == (201, longest), spawned.text[:500]
    process = psutil.Process(processes_of(spawned.json()["task_id"])[0])
    assert process.environ()["TRUNKLINE_TASK_DESCRIPTION"] == longest
    assert hub.operator.post(f"{path}/patient/stop", json={}).status_code == 200
    for at, body in (
        (f"{path}/spawn", {"task": longest + "!"}),
        (TASKS, {"agent_name": "idle", "description": longest + "!"}),
    ):
        refused = hub.operator.post(at, json=body)
        assert (refused.status_code, refused.json()["reason"]) == (400, "malformed")
        assert "at most 32000 characters" in refused.json()["message"]


def test_a_lower_limit_of_the_settings_counts_and_none_is_above_the_wire_form():
    check_task_text("x" * 10, 10)
    with pytest.raises(ApiError, match=r"has 11 characters, and limits\.task_characters allows 10"):
        check_task_text("x" * 11, 10)
    assert LimitSettings().task_characters == TASK_TEXT_LIMIT
