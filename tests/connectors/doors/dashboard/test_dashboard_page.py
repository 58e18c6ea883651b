"""The page in a real browser: what it shows, and that it changes without a reload."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from connectors.doors.dashboard.event_broadcast import parsed_position
from schemas.keys.sealing import job_secret_purpose
from schemas.streams.job.job_registry import JobRegistration
from tests.broker_processes import ProgramProcess, wait_until
from tests.connectors.doors.dashboard.scene import (
    append,
    event,
    full_life,
    joined,
    message,
    picked,
    raw_event,
    stopped,
    updated,
    write_tables,
)
from tests.connectors.doors.http_api.hub_access import add_principal, register

HOSTILE = "<img src=x onerror=\"window.hit='markup'\"> \u202egnp.exe\u2066 \u200bzero \ue000"


def live(page):
    expect(page.locator("#connection-text")).to_have_text("live")
    expect(page.locator("#board")).to_be_visible()
    return page


@pytest.mark.requirement("AM-12")
def test_agents_appear_and_change_without_a_reload(dashboard, publisher, open_page):
    page = live(open_page(dashboard.address))
    expect(page.locator("#agents-empty")).to_be_visible()
    append(publisher, [joined("nova", "counts the stars", ["count", "look"])])
    nova = page.locator("[data-agent=nova]")
    expect(nova.locator(".state")).to_have_text("initializing")
    expect(nova).to_contain_text("counts the stars · count, look")
    for status in ("working", "blocked", "idle"):
        append(publisher, [updated("nova", status)])
        expect(nova.locator(".state")).to_have_text(status)
    append(publisher, [stopped("nova", "all are counted")])
    expect(nova.locator(".state")).to_have_text("stopped")
    expect(nova).to_contain_text("all are counted")
    expect(page.locator("#agents-count")).to_have_text("")


@pytest.mark.requirement("AM-12")
def test_a_jobs_timeline_grows_from_its_start_to_its_end_while_one_looks(
    dashboard, operator, publisher, open_page
):
    page = live(open_page(dashboard.address))
    expect(page.locator("#jobs-empty")).to_be_visible()
    job = register(operator, description="rebuild the index", session="indexer")
    row = page.locator(f"#job-{job['job_id']}")
    expect(row.locator(".state")).to_have_text("pending")
    row.click()
    steps = page.locator(".timeline > li")
    expect(steps).to_have_count(1)
    operator.post("/api/hub/jobs/pick", json={"session": "indexer"})
    full_life(publisher, job)
    expect(steps.locator(".step-name")).to_have_text(
        [
            "registered",
            "picked",
            "started",
            "progress",
            "progress",
            "permission required",
            "progress",
            "completed",
        ]
    )
    expect(steps.nth(3)).to_contain_text("sent again once")
    expect(steps.nth(4)).to_have_attribute("data-verdict", "rejected")
    expect(steps.nth(4)).to_contain_text("bad_signature")
    expect(steps.nth(5)).to_contain_text("may I write to the index?")
    facts = page.locator(".facts")
    for fact in ("completed", "all pages are indexed", "5 accepted", "1 sent again"):
        expect(facts).to_contain_text(fact)
    expect(row.locator(".state")).to_have_text("completed")
    append(publisher, [event(job, 6, "progress", "too late")])
    expect(steps).to_have_count(9)
    expect(steps.last).to_contain_text("after_terminal")


@pytest.mark.requirement("AM-12")
def test_rejections_by_reason_lead_to_the_event_behind_them_and_to_its_job(
    dashboard, operator, publisher, open_page
):
    page = live(open_page(dashboard.address))
    expect(page.locator("#rejections-empty")).to_be_visible()
    job = picked(operator, "build the docs", "builder")
    append(publisher, [event({**job, "secret": "wrong"}, n, "progress", f"forged {n}") for n in (1, 2)])
    append(publisher, [raw_event(job["job_id"], b'{"schema_version": 1')])
    reason = page.locator("[data-reason=bad_signature]")
    expect(reason.locator(".row-figure")).to_have_text("2")
    reason.locator("button").click()
    expect(page.locator("#drawer .rows button")).to_have_count(2)
    page.locator("#drawer .rows button").first.click()
    drawer = page.locator("#drawer-body")
    for text in ("bad_signature", f"job/{job['job_id']}", "mqtt/unverified", '"detail": "forged 2"'):
        expect(drawer).to_contain_text(text)
    page.get_by_role("button", name="Show this job's timeline").click()
    expect(page.locator("#drawer-title")).to_have_text(f"Job {job['job_id']}")
    page.locator(".timeline .tag", has_text="malformed").click()
    expect(page.locator("pre")).to_have_text('{"schema_version": 1')
    page.get_by_role("button", name="Back").click()
    expect(page.locator("#drawer-title")).to_have_text(f"Job {job['job_id']}")


@pytest.mark.requirement("AM-12")
def test_mailboxes_freshness_and_lag_move(dashboard, operator, watcher, publisher, keyring, open_page):
    page = live(open_page(dashboard.address))
    figure = {
        name: page.locator(".figure", has_text=name) for name in ("Tables behind", "Live view lag", "Settled")
    }
    expect(figure["Tables behind"]).to_contain_text("no tables")
    expect(page.locator("#mailboxes-empty")).to_be_visible()
    append(publisher, [message("ann", "operator", f"note {n}") for n in range(3)])
    mailbox = page.locator("[data-mailbox='default/operator']")
    expect(mailbox.locator(".row-figure")).to_have_text("3")
    expect(mailbox).to_contain_text(re.compile(r"oldest for \d+ s"))
    expect(page.locator(".figure", has_text="Unread messages")).to_contain_text("3messages")
    write_tables(dashboard.settings, keyring, {0: 0, 1: 0, 2: 0, 3: 0})
    expect(figure["Tables behind"].locator(".figure-note")).to_have_text(re.compile(r"^[1-9]\d* records to go"))
    place = parsed_position(watcher.get("/api/snapshot").json()["position"], 1, 4)
    write_tables(dashboard.settings, keyring, place.offsets)
    expect(figure["Tables behind"].locator(".figure-note")).to_have_text("0 records to go")
    expect(figure["Tables behind"].locator(".figure-value")).to_have_text("0ms")
    operator.get("/api/hub/messages")
    expect(page.locator("#mailboxes-empty")).to_be_visible()
    expect(figure["Tables behind"].locator(".figure-note")).to_have_text(re.compile(r"^[1-9]\d* records to go"))
    lags = page.evaluate("() => window.trunkline.store.pulses.map((pulse) => pulse.live_lag_ms)")
    assert max(lags) > 0
    for one in figure.values():
        assert one.locator("path.stroke").get_attribute("d").startswith("M")


@pytest.mark.requirement("AM-13")
def test_what_agents_say_is_text_and_nothing_else(dashboard, operator, publisher, open_page):
    page = live(open_page(dashboard.address))
    said = []
    page.on("dialog", lambda dialog: said.append(dialog.message))
    job = picked(operator, f"{HOSTILE} <script>window.hit='script'</script>", "builder")
    append(publisher, [event(job, 1, "started", f"{HOSTILE} <b>bold</b>"), joined("nova", HOSTILE)])
    append(publisher, [raw_event(job["job_id"], '{"y": "\x1b[2J\x1b]0;pwned\x07 \u202e<i>x</i>"'.encode())])
    row = page.locator(f"#job-{job['job_id']}")
    shown = "<img src=x onerror=\"window.hit='markup'\"> \\u202egnp.exe\\u2066 \\u200bzero \\ue000"
    expect(row).to_contain_text(shown)
    expect(row.locator(".job-last")).to_contain_text(f"{shown} <b>bold</b>")
    expect(page.locator("[data-agent=nova]")).to_contain_text(shown)
    row.click()
    expect(page.locator(".timeline")).to_contain_text(f"{shown} <b>bold</b>")
    page.locator(".timeline .tag", has_text="malformed").click()
    expect(page.locator("pre")).to_have_text('{"y": "\\x1b[2J\\x1b]0;pwned\\x07 \\u202e<i>x</i>"')
    assert page.locator("#board img, #drawer img, #board b:not(.filters b), #drawer b").count() == 0
    assert page.evaluate("() => window.hit") is None and said == []
    assert page.locator(".said").first.evaluate("(one) => getComputedStyle(one).unicodeBidi") == "isolate"
    # And were there a way in for markup, the policy would not run it.
    refused = "() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } }"
    assert page.evaluate(refused)


def test_logging_in_leaves_no_token_behind_and_logging_out_shows_nothing_more(dashboard, operator, open_page):
    page = live(open_page(dashboard.address))
    assert page.url == f"{dashboard.page}/"
    assert dashboard.operator_token not in page.evaluate("() => document.cookie + JSON.stringify(localStorage)")
    page.reload()
    live(page)
    page.get_by_role("button", name="Log out").click()
    expect(page.locator("#login")).to_be_visible()
    page.get_by_label("Token").fill("x" * 43)
    page.keyboard.press("Enter")
    expect(page.locator("#login-error")).to_have_text("the token is not known, or revoked")
    page.get_by_label("Token").fill(add_principal(operator, "vera", "viewer"))
    page.keyboard.press("Enter")
    expect(page.locator("#who")).to_have_text("vera, viewer")
    live(page)
    operator.post("/api/hub/principals/vera/revoke", json={})
    expect(page.locator("#login")).to_be_visible()


@pytest.mark.requirement("AM-11")
def test_a_page_says_when_it_is_cut_off_and_catches_up_by_itself(dashboard, operator, tmp_path, open_page):
    page = live(open_page(dashboard.address))
    before = register(operator)["job_id"]
    expect(page.locator(f"#job-{before}")).to_be_visible()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    assert dashboard.program.stop() == 0
    expect(page.locator("#connection")).to_have_attribute("data-state", "reconnecting")
    again = ProgramProcess("connectors.programs.gateway_program", dashboard.settings, tmp_path, "again")
    try:
        again.wait_ready()
        live(page)
        after = register(operator)["job_id"]
        expect(page.locator(f"#job-{after}")).to_be_visible()
        assert any("/api/events?after=e1" in url for url in asked)
        assert not any("/api/snapshot" in url for url in asked)
    finally:
        assert again.stop() == 0


@pytest.mark.requirement("AM-12")
def test_of_ten_thousand_jobs_only_those_in_sight_are_in_the_page(dashboard, publisher, keyring, open_page):
    count = 10_000
    append(
        publisher,
        (
            JobRegistration(
                sealed_secret=keyring.seal(b"s", job_secret_purpose(f"{n:08x}")),
                job_id=f"{n:08x}",
                description=f"job {n}",
            ).record(door="cli", principal="operator")
            for n in range(count)
        ),
    )
    page = live(open_page(dashboard.address))
    expect(page.locator("#jobs-count")).to_have_text("10,000")
    known = "() => window.trunkline.store.order.length"
    wait_until(lambda: page.evaluate(known) == count, what="all jobs are in the page")
    rows = page.locator(".job")
    assert rows.count() < 60
    page.locator("#job-window").focus()
    page.keyboard.press("End")
    expect(page.locator(".job[aria-selected=true]")).to_have_attribute("aria-posinset", str(count))
    assert rows.count() < 60
    page.locator("#job-search").fill("job 4321")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("000010e1")
    page.locator("#job-search").fill("no job is like this")
    expect(page.locator("#jobs-empty")).to_have_text("No job fits what you look for.")
