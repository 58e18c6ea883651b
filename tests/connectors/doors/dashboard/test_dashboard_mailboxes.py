"""A mailbox opens on the dashboard: what waits, who holds a lease, what is dead, and the replay (DL-11)."""

from __future__ import annotations

import re
import time

import httpx
import pytest
from playwright.sync_api import expect

from tests.broker_processes import LOOPBACK, wait_until
from tests.connectors.doors.dashboard.scene import append, joined, message
from tests.connectors.doors.dashboard.test_dashboard_page import HOSTILE, live
from tests.connectors.doors.http_api.hub_access import add_principal

pytestmark = pytest.mark.requirement("DL-11")

MESSAGES = "/api/hub/messages"
# `gateway.max_attempts`.
ATTEMPTS = 5
SHOWN_HOSTILE = "<img src=x onerror=\"window.hit='markup'\"> \\u202egnp.exe\\u2066 \\u200bzero \\ue000"
NARROW = {"width": 360, "height": 740}


@pytest.fixture
def wilma(dashboard, operator):
    """A worker with a mailbox, as a client of the hub."""
    with dashboard.client(add_principal(operator, "wilma", "worker")) as client:
        yield client


def sent(client, recipient="wilma", payload="hello", **fields):
    """Send a message; its id."""
    body = {"recipient": recipient, "type": "note", "payload": payload, **fields}
    answer = client.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["message_id"]


def leased(client, seconds=60, limit=1):
    """Lease messages of the client's own mailbox: the id of the lease and the ids of the messages."""
    found = client.get(MESSAGES, params={"lease": seconds, "limit": limit}).json()
    return found["lease_id"], [one["id"] for one in found["messages"]]


def given_back(client, reason):
    """Lease one message and give it back."""
    lease_id, ids = leased(client)
    body = {"lease_id": lease_id, "message_ids": ids, "reason": reason}
    answer = client.post(f"{MESSAGES}/nack", json=body)
    assert answer.json()["done"] == ids, answer.text
    return ids[0]


def killed(client, reason="no disk"):
    """Give the first message of the mailbox back until it is dead; its id."""
    ids = {given_back(client, reason) for _ in range(ATTEMPTS)}
    assert len(ids) == 1
    return ids.pop()


def opened(page, mailbox="default/wilma"):
    """Open a mailbox by mouse; its drawer."""
    page.locator(f"[data-mailbox='{mailbox}'] button").click()
    return page.locator("#drawer")


def rows(page, kind):
    """The rows of one of the three lists."""
    return page.locator(f"[data-messages={kind}] li")


def row_of(page, message_id):
    """The row of a message."""
    return page.locator(f"#drawer [data-message='{message_id}']")


def replay_button(page):
    """The button that replays a message, whichever has one."""
    return page.get_by_role("button", name="Replay", exact=False).and_(page.locator(".replay"))


def test_a_mailbox_opens_and_shows_each_message_with_holder_lease_attempt_and_last_reason(
    dashboard, operator, wilma, open_page
):
    dead = sent(operator, payload="kill me")
    assert killed(wilma, "no disk left") == dead
    held = sent(operator, subject="two flaky tests <b>")
    lease_id, _ = leased(wilma, 90)
    waits, urgent = sent(operator), sent(operator, payload="later")
    page = live(open_page(dashboard.address))
    box = page.locator("[data-mailbox='default/wilma']")
    expect(box.locator(".row-figure")).to_have_text("3")
    expect(box).to_contain_text("1 dead")
    drawer = opened(page)
    expect(page.locator("#drawer-title")).to_have_text("Mailbox wilma")
    expect(page.locator("#drawer-title")).to_be_focused()
    assert page.url.endswith("#mailbox/default/wilma")
    expect(drawer.locator("h3")).to_have_text(["Leased 1", "Dead 1", "Waiting 2"])
    assert [row.get_attribute("data-message") for row in rows(page, "waiting").all()] == [waits, urgent]
    for text in ("note from operator", "two flaky tests <b>", "held by http/wilma", "attempt 1", " s old"):
        expect(row_of(page, held)).to_contain_text(text)
    for text in ("note from operator", f"{ATTEMPTS} attempts", "no disk left", "died "):
        expect(row_of(page, dead)).to_contain_text(text)
    # The countdown moves by itself, and follows an extension.
    figure = row_of(page, held).locator(".row-figure")
    expect(figure).to_have_text(re.compile(r"^[5-9]\d s left$"))
    before = figure.inner_text()
    expect(figure).not_to_have_text(before)
    longer = {"lease_id": lease_id, "message_ids": [held], "lease": 3000}
    assert wilma.post(f"{MESSAGES}/extend", json=longer).json()["done"] == [held]
    expect(figure).to_have_text(re.compile(r"^(49|50):\d\d min left$"))
    row_of(page, dead).locator(".row").click()
    for text in ("dead", "http/wilma", "no disk left", '"kill me"'):
        expect(page.locator("#drawer-body")).to_contain_text(text)
    page.get_by_role("button", name="Back").click()
    expect(page.locator("#drawer-title")).to_have_text("Mailbox wilma")


def test_an_open_mailbox_changes_as_records_settle_and_when_a_lease_runs_out(
    dashboard, operator, wilma, open_page
):
    page = live(open_page(f"{dashboard.address}"))
    first = sent(operator)
    opened(page)
    expect(rows(page, "waiting")).to_have_count(1)
    second = sent(operator)
    expect(rows(page, "waiting")).to_have_count(2)
    row_of(page, second).locator(".row").focus()
    lease_id, ids = leased(wilma)
    assert ids == [first]
    expect(rows(page, "leased")).to_have_count(1)
    expect(rows(page, "waiting")).to_have_count(1)
    expect(row_of(page, second).locator(".row")).to_be_focused()
    wilma.post(f"{MESSAGES}/ack", json={"lease_id": lease_id, "message_ids": [first]})
    expect(rows(page, "leased")).to_have_count(0)
    leased(wilma, 2)
    expect(rows(page, "leased")).to_have_count(1)
    expect(row_of(page, second)).to_contain_text("handed out once")
    expect(rows(page, "waiting")).to_have_count(1)
    for _ in range(ATTEMPTS - 1):
        given_back(wilma, "cannot read it")
    expect(rows(page, "dead")).to_have_count(1)
    expect(rows(page, "waiting")).to_have_count(0)
    expect(page.locator("[data-mailbox='default/wilma']")).to_contain_text("1 dead")


def test_a_double_click_replays_a_dead_message_once_and_the_button_goes(dashboard, operator, wilma, open_page):
    dead = sent(operator, payload="again")
    killed(wilma)
    page = live(open_page(dashboard.address))
    asked = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    opened(page)
    replay_button(page).dblclick()
    note = page.locator("#drawer .note")
    expect(note).to_contain_text("Replayed as message ")
    expect(note).to_be_focused()
    expect(note).to_have_attribute("role", "status")
    expect(page.locator(".replay")).to_be_hidden()
    expect(rows(page, "waiting")).to_have_count(1)
    expect(row_of(page, dead)).to_contain_text("replayed")
    drained = wilma.get(MESSAGES).json()["messages"]
    assert [(one["payload"], one["replay_of"]) for one in drained] == [("again", dead)]
    assert len(asked) == 1, asked
    expect(rows(page, "waiting")).to_have_count(0)
    note.get_by_role("button").click()
    expect(page.locator("#drawer-body .facts")).to_contain_text(dead)
    expect(page.locator("#drawer-body .facts .state")).to_have_text("claimed")


def test_by_keyboard_a_mailbox_opens_a_message_is_read_and_a_dead_one_is_replayed(
    dashboard, operator, wilma, open_page
):
    dead = sent(operator, payload="by keyboard")
    killed(wilma)
    page = live(open_page(dashboard.address))
    page.locator("[data-mailbox='default/wilma'] button").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#drawer-title")).to_be_focused()
    expect(row_of(page, dead)).to_be_visible()

    def tab_to(locator):
        for _ in range(12):
            page.keyboard.press("Tab")
            if locator.evaluate("(one) => one === document.activeElement"):
                return
        raise AssertionError("the tabulator does not get there")

    tab_to(row_of(page, dead).locator(".row"))
    page.keyboard.press("Enter")
    expect(page.locator("pre")).to_have_text('"by keyboard"')
    expect(page.locator("#drawer-title")).to_be_focused()
    tab_to(page.locator("#drawer-body .replay"))
    page.keyboard.press("Enter")
    expect(page.locator("#drawer .note")).to_contain_text("Replayed as message ")
    expect(page.locator("#drawer-body .replay")).to_have_count(0)
    expect(page.locator("#drawer .note")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#drawer")).to_be_hidden()
    expect(page.locator("[data-mailbox='default/wilma'] button")).to_be_focused()
    assert len(wilma.get(MESSAGES).json()["messages"]) == 1


def test_a_viewer_sees_neither_body_nor_button_and_is_refused(dashboard, operator, wilma, open_page):
    dead = sent(operator, payload="for wilma's eyes")
    killed(wilma)
    token = add_principal(operator, "vera", "viewer")
    page = live(open_page(f"{dashboard.page}/#token={token}"))
    opened(page)
    expect(row_of(page, dead)).to_contain_text("no disk")
    expect(page.locator(".replay:visible")).to_have_count(0)
    row_of(page, dead).locator(".row").click()
    expect(page.locator("#drawer-body")).to_contain_text("Nothing that may be shown to you.")
    expect(page.locator("#drawer-body")).not_to_contain_text("wilma's eyes")
    path = f"/api/mailboxes/default/wilma/messages/{dead}"
    change = """async (path) => {
      const { change } = await import("/page/api.js");
      return (await change(path).catch((error) => error)).message;
    }"""
    replayed = page.evaluate(change, f"{path}/replay")
    assert "a viewer may not do message.replay" in replayed
    with dashboard.watcher(token) as vera:
        assert vera.get(path).json()["body"] is None
        assert vera.post(f"{path}/replay").status_code == 403
    assert wilma.get(MESSAGES).json()["messages"] == []


def test_a_delegator_replays_only_messages_of_its_own_mailbox(dashboard, operator):
    token = add_principal(operator, "dora", "delegator")
    other = add_principal(operator, "wilma", "worker")
    paths = {}
    for name, one in (("dora", token), ("wilma", other)):
        with dashboard.client(one) as client:
            sent(operator, name)
            paths[name] = f"/api/mailboxes/default/{name}/messages/{killed(client)}/replay"
    with dashboard.watcher(token) as dora:
        assert dora.get("/api/mailboxes/default/wilma").json()["may_replay"] is False
        assert dora.get("/api/mailboxes/default/dora").json()["may_replay"] is True
        assert dora.post(paths["wilma"]).status_code == 403
        first, again = dora.post(paths["dora"]).json(), dora.post(paths["dora"]).json()
        assert first["replayed"] and first == again


@pytest.mark.requirement("AM-13")
def test_a_change_needs_the_pages_origin_and_a_key_that_the_cookie_does_not_give(dashboard, operator, wilma):
    path = f"/api/mailboxes/default/wilma/messages/{sent(operator)}/replay"
    killed(wilma)
    ours, evil = {"Origin": dashboard.page}, {"Origin": "http://evil.example"}
    with dashboard.watcher("") as browser:
        answer = browser.post("/api/login", json={"token": dashboard.operator_token}, headers=ours)
        key = {"X-Trunkline-Change-Key": answer.json()["change_key"]}
        cookie = next(iter(browser.cookies.values()))
        assert answer.json()["change_key"] not in cookie
        for headers in (
            {},
            ours,
            key,
            {**ours, "X-Trunkline-Change-Key": ""},
            {**ours, "X-Trunkline-Change-Key": "0" * 64},
            {**ours, "X-Trunkline-Change-Key": cookie},
        ):
            refused = browser.post(path, headers=headers)
            assert (refused.status_code, refused.json()["reason"]) == (403, "login_needed"), headers
        for headers in (
            {**key, **evil},
            {**key, "Origin": "null"},
            {**key, "Origin": f"http://{LOOPBACK}:1"},
            {**key, **ours, "Sec-Fetch-Site": "same-site"},
            {**key, **ours, "Host": "evil.example"},
        ):
            refused = browser.post(path, headers=headers)
            assert (refused.status_code, refused.json()["reason"]) == (403, "policy"), headers
        # The key of another login belongs to another cookie.
        time.sleep(1)
        with dashboard.watcher("") as other:
            later = other.post("/api/login", json={"token": dashboard.operator_token}, headers=ours).json()
        foreign = browser.post(path, headers={**ours, "X-Trunkline-Change-Key": later["change_key"]})
        assert foreign.status_code == 403
        assert wilma.get(MESSAGES).json()["messages"] == []
        for route in ("/api/snapshot", "/api/mailboxes/default/wilma"):
            assert key["X-Trunkline-Change-Key"] not in browser.get(route).text
        assert browser.post(path, headers={**ours, **key}).json()["replayed"] is True
    assert httpx.post(f"{dashboard.page}{path}", headers=key, trust_env=False).status_code == 401
    assert len(wilma.get(MESSAGES).json()["messages"]) == 1
    assert key["X-Trunkline-Change-Key"] not in dashboard.program.log()


def test_a_tab_without_the_key_says_how_to_get_it_and_replays_after_a_login(
    dashboard, operator, wilma, open_page
):
    dead = sent(operator)
    killed(wilma)
    page = live(open_page(dashboard.address))
    page.evaluate("() => sessionStorage.clear()")
    opened(page)
    replay_button(page).click()
    expect(page.locator("#drawer .note")).to_contain_text("log in again in this tab")
    page.get_by_role("button", name="Log in again").click()
    page.get_by_label("Token").fill(dashboard.operator_token)
    page.keyboard.press("Enter")
    live(page)
    # The address still names the mailbox, so it opens again.
    expect(row_of(page, dead)).to_be_visible()
    replay_button(page).click()
    expect(page.locator("#drawer .note")).to_contain_text("Replayed as message ")


def test_what_a_mailbox_does_not_have_or_is_not_dead_is_answered_404_and_409(dashboard, operator, watcher):
    add_principal(operator, "wilma", "worker")
    alive = sent(operator)
    at = "/api/mailboxes/default/wilma/messages"
    assert watcher.get(f"{at}/nothing").status_code == 404
    assert watcher.post(f"{at}/nothing/replay").status_code == 404
    assert watcher.post(f"{at}/{alive}/replay").status_code == 409
    empty = watcher.get("/api/mailboxes/default/nobody").json()
    assert [empty[kind]["count"] for kind in ("waiting", "leased", "dead")] == [0, 0, 0]
    for bad in ("/api/mailboxes/default/a b", "/api/mailboxes/default/wilma?limit=0", f"{at}/{'x' * 129}"):
        assert watcher.get(bad).status_code == 400, bad
    assert httpx.post(f"{dashboard.page}{at}/{alive}/replay", trust_env=False).status_code == 401


@pytest.mark.requirement("AM-13")
def test_hostile_senders_reasons_and_bodies_are_text_and_nothing_else(
    dashboard, operator, wilma, publisher, open_page
):
    dead = sent(operator, payload={"text": HOSTILE}, type="note")
    killed(wilma, f"{HOSTILE} <b>no</b> <script>window.hit='script'</script>")
    append(publisher, [joined("wilma", HOSTILE)])
    page = live(open_page(dashboard.address))
    opened(page)
    expect(row_of(page, dead)).to_contain_text(f"{SHOWN_HOSTILE} <b>no</b> <script>")
    row_of(page, dead).locator(".row").click()
    expect(page.locator("#drawer-body")).to_contain_text(f"{SHOWN_HOSTILE} <b>no</b> <script>")
    expect(page.locator("pre")).to_contain_text("\\u202egnp.exe")
    assert page.locator("#drawer img, #drawer b, #drawer script").count() == 0
    page.get_by_role("button", name="wilma", exact=True).click()
    page.get_by_role("button", name="Agent wilma").click()
    expect(page.locator("#drawer-body .lead")).to_have_text(SHOWN_HOSTILE)
    assert page.locator("#drawer img, #drawer b, #drawer script").count() == 0
    assert page.evaluate("() => window.hit") is None


def test_of_ten_thousand_messages_the_first_are_listed_and_the_cut_is_said(
    dashboard, operator, publisher, open_page
):
    append(publisher, (message("ann", "operator", f"note {n}") for n in range(9_999)))
    append(publisher, [message("ann", "operator", "urgent", "high")])
    page = live(open_page(dashboard.address))
    figure = page.locator("[data-mailbox='default/operator'] .row-figure")
    expect(figure).to_have_text("10,000")
    opened(page, "default/operator")
    expect(rows(page, "waiting")).to_have_count(100)
    expect(page.locator("#messages-waiting")).to_have_text("Waiting 10,000")
    expect(page.locator("#drawer-body")).to_contain_text("The next 100 of 10,000.")
    expect(rows(page, "waiting").first).to_contain_text("high priority")
    page.get_by_role("button", name="Show up to 1,000").click()
    expect(rows(page, "waiting")).to_have_count(1_000)
    expect(page.locator("#drawer-body")).to_contain_text("The next 1,000 of 10,000.")
    expect(page.get_by_role("button", name="Show up to 1,000")).to_be_hidden()
    asked = []
    page.on("request", lambda request: asked.append(time.monotonic()) if "limit=1000" in request.url else None)
    for _ in range(20):
        operator.get(MESSAGES, params={"limit": 50})
    expect(page.locator("#messages-waiting")).to_have_text("Waiting 9,000")
    wait_until(lambda: page.locator(".job").count() == 0, what="the page answers")
    # A burst of records costs few requests.
    assert 0 < len(asked) <= 20, len(asked)


def test_a_narrow_and_a_dark_screen_show_the_mailbox_without_scrolling_sideways(
    dashboard, operator, wilma, open_page
):
    sent(operator, type="k" * 128, payload="w" * 300)
    killed(wilma, "r" * 500)
    sent(operator, type="k" * 128)
    for scheme in ("light", "dark"):
        page = live(open_page(dashboard.address, viewport=NARROW, color_scheme=scheme))
        opened(page)
        expect(replay_button(page)).to_be_visible()
        body = page.locator("#drawer-body")
        assert body.evaluate("(one) => one.scrollWidth <= one.clientWidth")
        box, width = replay_button(page).bounding_box(), NARROW["width"]
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        label = replay_button(page).get_attribute("aria-label")
        assert label.startswith("Replay ") and "from operator" in label
        rows(page, "dead").locator(".row").click()
        expect(page.locator("pre")).to_be_visible()
        assert body.evaluate("(one) => one.scrollWidth <= one.clientWidth")
