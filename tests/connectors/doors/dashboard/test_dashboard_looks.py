"""How the page looks and is used: light and dark, by keyboard, on a narrow screen. And its pictures.

With TRUNKLINE_SCREENSHOTS=1 the pictures of docs/images are made anew; else they go into the test's folder.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from connectors.doors.dashboard.event_broadcast import parsed_position
from connectors.hub.launcher.local_processes import stop_all
from schemas.settings.settings import PROJECT_ROOT
from tests.connectors.doors.dashboard.scene import (
    STEPS,
    append,
    event,
    joined,
    mailbox_at_work,
    message,
    play,
    updated,
    write_tables,
)

pytestmark = pytest.mark.requirement("AM-12")

PICTURES = PROJECT_ROOT / "docs" / "images"
NARROW = {"width": 360, "height": 740}
# So long something happens before the pictures of the docs are taken, for the plots to have a shape.
ALIVE_S = 75


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where the pictures go."""
    return PICTURES if os.environ.get("TRUNKLINE_SCREENSHOTS") else tmp_path


def open_board(dashboard, open_page, **options):
    page = open_page(dashboard.address, **options)
    expect(page.locator("#connection-text")).to_have_text("live")
    expect(page.locator("#board")).to_be_visible()
    return page


def contrast(page, selector):
    """The contrast (WCAG) of an element's text with what is behind it."""
    return page.locator(selector).first.evaluate(
        """(element) => {
          const parts = (text) => text.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, place) => sum + c * [0.2126, 0.7152, 0.0722][place], 0);
          let behind = element;
          const paper = (one) => parts(getComputedStyle(one).backgroundColor);
          while (paper(behind).length === 4 && paper(behind)[3] < 1) behind = behind.parentElement;
          const pair = [light(parts(getComputedStyle(element).color)), light(paper(behind))];
          return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
        }"""
    )


def keep_alive(dashboard, operator, watcher, publisher, keyring, jobs):
    """Something happens for a while: the plots of the docs' pictures."""
    until, seq = time.monotonic() + ALIVE_S, 20
    listed = watcher.get("/api/jobs", params={"state": "running"}).json()["jobs"]
    going = [job for job in jobs if job["job_id"] in {one["job_id"] for one in listed}]
    while time.monotonic() < until:
        wave = 3 + (seq * 7) % (len(going) - 3)
        append(publisher, [event(job, seq, "progress", STEPS[seq % 5]) for job in going[:wave]])
        if seq % 5 == 0:
            append(publisher, [message("writer", "builder", "next"), event(jobs[0], seq, "progress", "late")])
        if seq % 17 == 0:
            operator.get("/api/hub/messages", params={"limit": 6})
        if seq % 4 == 0:
            place = parsed_position(watcher.get("/api/snapshot").json()["position"], 1, 4)
            write_tables(dashboard.settings, keyring, place.offsets)
        seq += 1
        time.sleep(0.35)


@pytest.fixture
def tasks(dashboard, operator):
    """Two tasks run, one is completed and one has failed; their ids."""
    texts = (
        "Answer the questions of the night shift",
        "Answer mail",
        "Explain the new layout",
        "Sum up the day",
    )
    ids = []
    for text in texts:
        answer = operator.post("/api/hub/tasks", json={"agent_name": "echo", "description": text})
        ids.append(answer.json()["task"]["id"])
    operator.post(f"/api/hub/tasks/{ids[1]}/complete", json={"result": {"answered": 12}})
    operator.post(f"/api/hub/tasks/{ids[2]}/fail", json={"error": "there is no layout yet"})
    yield ids
    for task_id in ids:
        operator.post(f"/api/hub/tasks/{task_id}/cancel", json={})
    stop_all(dashboard.settings, 0.0)


def test_the_pictures_of_the_docs(dashboard, operator, watcher, publisher, keyring, open_page, pictures, tasks):
    page = open_board(dashboard, open_page, color_scheme="light", reduced_motion="reduce")
    jobs = play(operator, publisher)
    mailbox_at_work(publisher, "builder")
    expect(page.locator("#jobs-count")).to_have_text(str(len(jobs)))
    expect(page.locator("[data-reason=bad_signature]")).to_be_visible()
    if pictures == PICTURES:
        keep_alive(dashboard, operator, watcher, publisher, keyring, jobs)
    page.screenshot(path=pictures / "dashboard-light.png")
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=pictures / "dashboard-dark.png")
    page.emulate_media(color_scheme="light")
    page.locator("#job-search").fill(jobs[0]["job_id"])
    page.locator(f"#job-{jobs[0]['job_id']}").click()
    expect(page.locator(".timeline > li")).not_to_have_count(0)
    page.screenshot(path=pictures / "dashboard-timeline.png")
    page.keyboard.press("Escape")
    page.locator("[data-reason=bad_signature] button").click()
    page.locator("#drawer .rows button").first.click()
    expect(page.locator("pre")).to_be_visible()
    page.screenshot(path=pictures / "dashboard-event.png")
    page.keyboard.press("Escape")
    page.locator("[data-mailbox='default/builder'] button").click()
    expect(page.locator("[data-messages=leased] li")).to_have_count(2)
    expect(page.locator(".replay")).to_be_visible()
    page.screenshot(path=pictures / "dashboard-mailbox.png")
    narrow = open_board(dashboard, open_page, viewport=NARROW, color_scheme="dark")
    expect(narrow.locator(".job").first).to_be_visible()
    narrow.screenshot(path=pictures / "dashboard-narrow.png")
    assert all(path.stat().st_size > 10_000 for path in pictures.glob("dashboard-*.png"))


def test_light_and_dark_follow_the_system_and_both_can_be_read(dashboard, operator, publisher, open_page):
    page = open_board(dashboard, open_page)
    play(operator, publisher, jobs=12)
    expect(page.locator("[data-agent=porter]")).to_be_visible()
    expect(page.locator(".job")).to_have_count(12)
    papers = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        papers.append(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        for selector in (
            ".job-name .said",
            ".job-name .mono",
            ".job-age",
            ".row-note",
            ".row-name",
            ".figure-note",
            ".filters button[aria-pressed=true]",
            ".filters button[aria-pressed=false]",
            ".connection",
            ".is-over .row-name",
        ):
            assert contrast(page, selector) >= 4.5, (scheme, selector)
    assert papers[0] != papers[1]
    mailbox_at_work(publisher, "builder")
    page.locator("[data-mailbox='default/builder'] button").click()
    expect(page.locator(".replay")).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for selector in (".replay", "#drawer .row-note", "#drawer .row-figure", "#drawer h3"):
            assert contrast(page, selector) >= 4.5, (scheme, selector)


def test_everything_is_reached_and_done_by_keyboard(dashboard, operator, publisher, open_page):
    page = open_board(dashboard, open_page)
    jobs = play(operator, publisher, jobs=12)
    expect(page.locator(".job")).to_have_count(12)
    expect(page.locator("[data-reason=bad_signature]")).to_be_visible()
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => {
                  const one = document.activeElement, style = getComputedStyle(one);
                  const name = one === document.body ? "BODY" : one.id || one.className || one.textContent;
                  return [name, style.outlineStyle !== "none"];
                }"""
            )
        )
    names = [str(name) for name, _ in reached]
    for wanted in ("skip", "logout", "job-search", "job-window", "row"):
        assert wanted in names, (wanted, names)
    assert all(is_visible for name, is_visible in reached if name != "BODY"), reached
    # The last Tab may have led into a field, where "/" is a character.
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    expect(page.locator("#job-search")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#job-window")).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    second = page.locator(".job[aria-selected=true]")
    expect(second).to_have_attribute("aria-posinset", "2")
    chosen = second.get_attribute("id")
    assert page.locator("#job-window").get_attribute("aria-activedescendant") == chosen
    page.keyboard.press("Enter")
    expect(page.locator("#drawer-title")).to_be_focused()
    expect(page.locator("#drawer-title")).to_have_text(f"Job {chosen.removeprefix('job-')}")
    page.keyboard.press("Escape")
    expect(page.locator("#drawer")).to_be_hidden()
    expect(page.locator("#job-window")).to_be_focused()
    page.locator("[data-reason=bad_signature] button").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#drawer .rows button").first).to_be_visible()
    page.keyboard.press("Escape")
    page.goto(f"{dashboard.page}/#job/{jobs[0]['job_id']}")
    for _ in range(2):
        expect(page.locator("#drawer-title")).to_have_text(f"Job {jobs[0]['job_id']}")
        page.reload()


def test_a_narrow_screen_shows_everything_without_scrolling_sideways(dashboard, operator, publisher, open_page):
    page = open_board(dashboard, open_page, viewport=NARROW, reduced_motion="reduce")
    long_name = "n" * 120
    append(publisher, [joined(long_name, "w" * 300), updated(long_name, "working")])
    jobs = play(operator, publisher, jobs=12)
    # All are there: the list stands still from now on.
    expect(page.locator("#jobs-count")).to_have_text(str(len(jobs)))
    expect(page.locator(f"[data-agent={long_name}]")).to_be_visible()

    def is_too_wide():
        return page.evaluate("() => document.documentElement.scrollWidth > window.innerWidth")

    assert not is_too_wide()
    # Each row holds what stands in it, and none lies over another.
    for row in page.locator(".job").all()[:5]:
        # At one moment: the list may move.
        (top, bottom), *parts = row.evaluate(
            "(row) => [row, ...[...row.children].filter((c) => c.offsetHeight)]"
            ".map((one) => one.getBoundingClientRect()).map((box) => [box.top, box.bottom])"
        )
        assert len(parts) >= 4 and all(top <= above and below <= bottom for above, below in parts), parts
    boxes = sorted((one.bounding_box() for one in page.locator(".job").all()[:5]), key=lambda box: box["y"])
    assert all(above["y"] + above["height"] <= below["y"] + 1 for above, below in itertools.pairwise(boxes))
    page.locator(f"#job-{jobs[-1]['job_id']}").click()
    expect(page.locator("#drawer")).to_be_visible()
    assert page.locator("#drawer").bounding_box()["width"] <= NARROW["width"]
    assert not is_too_wide()
    assert page.locator("#drawer").evaluate("(one) => getComputedStyle(one).animationName") == "none"
