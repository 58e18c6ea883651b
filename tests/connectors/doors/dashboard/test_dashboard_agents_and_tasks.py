"""Agents and tasks open on the dashboard, with links between them and to their mailboxes (DL-12)."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from connectors.hub.launcher.local_processes import stop_all
from tests.connectors.doors.dashboard.scene import append, joined, message, stopped, updated
from tests.connectors.doors.dashboard.test_dashboard_page import HOSTILE, live
from tests.connectors.doors.http_api.hub_access import add_principal

pytestmark = pytest.mark.requirement("DL-12")

TASKS = "/api/hub/tasks"
NARROW = {"width": 360, "height": 740}


@pytest.fixture
def submit(dashboard, operator):
    """Gives the agent `echo` a task: the answer of the hub. At the end, all agents are stopped."""
    ids = []

    def submitted(description="count the stars"):
        body = {"agent_name": "echo", "description": description}
        answer = operator.post(TASKS, json=body)
        assert answer.status_code == 201, answer.text
        ids.append(answer.json()["task"]["id"])
        return answer.json()

    yield submitted
    for task_id in ids:
        operator.post(f"{TASKS}/{task_id}/cancel", json={})
    stop_all(dashboard.settings, 0.0)


def fact(page, name):
    """The value of a fact in the drawer."""
    return page.locator(f"#drawer-body dt:text-is('{name}') + dd")


def title(page):
    """The title of the drawer."""
    return page.locator("#drawer-title")


def test_an_agent_opens_and_follows_its_status_mailbox_and_end(dashboard, publisher, open_page):
    append(publisher, [joined("nova", "counts the stars", ["count", "look"])])
    page = live(open_page(dashboard.address))
    page.locator("[data-agent=nova] button").click()
    expect(title(page)).to_have_text("Agent nova")
    expect(title(page)).to_be_focused()
    assert page.url.endswith("#agent/nova")
    expect(page.locator("#drawer-body .lead")).to_have_text("counts the stars")
    expect(fact(page, "Status")).to_have_text("initializing")
    expect(fact(page, "Capabilities")).to_have_text("count, look")
    expect(fact(page, "Joined")).to_contain_text("ago")
    expect(page.locator("#drawer-body")).to_contain_text("No task was given to it.")
    append(publisher, [updated("nova", "blocked"), *(message("ann", "nova", f"note {n}") for n in range(3))])
    expect(fact(page, "Status")).to_have_text("blocked")
    expect(fact(page, "Mailbox")).to_have_text("3 waiting, 0 leased, 0 dead")
    fact(page, "Mailbox").locator("button").focus()
    append(publisher, [stopped("nova", "all are counted")])
    expect(fact(page, "Stopped")).to_contain_text("all are counted")
    expect(fact(page, "Mailbox").locator("button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(title(page)).to_have_text("Mailbox nova")
    expect(page.locator("[data-messages=waiting] li")).to_have_count(3)
    page.get_by_role("button", name="Agent nova").click()
    expect(title(page)).to_have_text("Agent nova")
    page.get_by_role("button", name="Back").click()
    expect(title(page)).to_have_text("Mailbox nova")


def test_a_task_opens_with_token_state_and_container_and_shows_its_result(
    dashboard, operator, watcher, submit, open_page
):
    page = live(open_page(dashboard.address))
    expect(page.locator("#tasks-empty")).to_be_visible()
    answer = submit()
    task_id = answer["task"]["id"]
    row = page.locator(f"[data-task='{task_id}']")
    expect(row.locator(".state")).to_have_text("running")
    row.locator("button").focus()
    page.keyboard.press("Enter")
    expect(title(page)).to_have_text(f"Task {task_id}")
    expect(title(page)).to_be_focused()
    expect(page.locator("#drawer-body .lead")).to_have_text("count the stars")
    expect(fact(page, "Status")).to_have_text("running")
    expect(fact(page, "Capabilities")).to_have_text("answer")
    expect(fact(page, "Submitted")).to_contain_text("by http/operator")
    expect(fact(page, "Token")).to_have_text(re.compile(r"^active, for .* more$"))
    expect(fact(page, "Container")).to_contain_text(f"task-{task_id}")
    expect(fact(page, "Ran")).to_contain_text("so far")
    ran = fact(page, "Ran").inner_text()
    expect(fact(page, "Ran")).not_to_have_text(ran)
    shown = watcher.get(f"/api/tasks/{task_id}").text
    assert answer["token"] not in shown and answer["task"]["token_id"] not in shown
    fact(page, "Agent").locator("button").click()
    expect(title(page)).to_have_text("Agent echo")
    expect(fact(page, "Status")).to_have_text("working")
    expect(fact(page, "Image")).to_have_text("trunkline/echo")
    page.locator("#drawer-body .rows button").click()
    expect(title(page)).to_have_text(f"Task {task_id}")
    result = {"stars": 9, "note": f"{HOSTILE} <b>bold</b>"}
    assert operator.post(f"{TASKS}/{task_id}/complete", json={"result": result}).status_code == 200
    expect(fact(page, "Status")).to_have_text("completed")
    expect(page.locator("pre")).to_contain_text('"stars":9')
    expect(page.locator("pre")).to_contain_text("<b>bold</b>")
    expect(fact(page, "Token")).to_contain_text("revoked")
    expect(fact(page, "Container")).to_contain_text("recycl")
    expect(row.locator(".state")).to_have_text("completed")
    assert page.locator("#drawer b, #drawer img").count() == 0


def test_a_failed_task_shows_its_error_and_a_viewer_sees_it_by_its_address(
    dashboard, operator, submit, open_page
):
    task_id = submit(f"{'w' * 300} <i>much</i>")["task"]["id"]
    failed = operator.post(f"{TASKS}/{task_id}/fail", json={"error": "the sky is <b>cloudy</b>"})
    assert failed.status_code == 200
    token = add_principal(operator, "vera", "viewer")
    page = live(open_page(f"{dashboard.page}/#token={token}", viewport=NARROW, color_scheme="dark"))
    page.goto(f"{dashboard.page}/#task/{task_id}")
    expect(title(page)).to_have_text(f"Task {task_id}")
    expect(fact(page, "Status")).to_have_text("failed")
    expect(page.locator("pre")).to_have_text("the sky is <b>cloudy</b>")
    expect(page.locator("#drawer-body .lead")).to_contain_text("<i>much</i>")
    body = page.locator("#drawer-body")
    assert body.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("#drawer b, #drawer i").count() == 0
    page.reload()
    expect(title(page)).to_have_text(f"Task {task_id}")


def test_the_routes_of_agents_and_tasks_answer_404_and_400(watcher, publisher):
    for route in ("/api/agents/nobody", "/api/tasks/nothing"):
        assert watcher.get(route).status_code == 404, route
    for route in ("/api/agents/-", "/api/tasks/a b", f"/api/tasks/{'x' * 129}"):
        assert watcher.get(route).status_code == 400, route
    assert watcher.get("/api/tasks").json() == {"tasks": [], "total": 0}
    assert watcher.get("/api/agents/echo").json()["definition"]["is_defined"] is True
