"""The page `/docs` of the gateway in a real browser (DL-13): the API, and nothing loaded from elsewhere."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.kafka, pytest.mark.requirement("DL-13")]
PRINCIPALS = "#operations-principals-list_principals_api_hub_principals_get"
# Breaches of the page's policy, kept for the test to read.
WATCH = """
window.breaches = [];
document.addEventListener("securitypolicyviolation", (event) => {
  breaches.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


@pytest.fixture
def docs(open_page, gateway) -> Page:
    """The page, and in `page.asked` the addresses of all its requests."""
    page = open_page("about:blank")
    # It shows all operations at once, which takes a browser on a busy machine half a minute.
    page.set_default_timeout(90_000)
    page.asked = []
    page.on("request", lambda request: page.asked.append(request.url))
    page.add_init_script(WATCH)
    page.goto(f"{gateway.url}/docs")
    return page


@pytest.fixture
def gateway(dashboard):
    """The gateway: its hub is what these tests look at."""
    return dashboard


def from_elsewhere(page: Page, url: str) -> list[str]:
    """The requests of a page to another origin than that of the gateway."""
    hosts = [(one, urlsplit(one)) for one in page.asked]
    return [
        one
        for one, parts in hosts
        if parts.scheme not in ("about", "data") and parts.netloc != urlsplit(url).netloc
    ]


def authorize(page: Page, token: str) -> None:
    page.get_by_role("button", name="Authorize").first.click()
    page.locator(".modal-ux input").fill(token)
    page.locator(".modal-ux button.authorize").click()
    page.locator(".modal-ux button.btn-done").click()


def tried(page: Page) -> Any:
    """Status and body of the answer to `GET /api/hub/principals`, sent by the page."""
    operation = page.locator(PRINCIPALS)
    with page.expect_response("**/api/hub/principals") as waiting:
        operation.get_by_role("button", name="Execute").click()
    status = waiting.value.status
    expect(operation.locator(".live-responses-table tbody .response-col_status")).to_contain_text(str(status))
    return status, operation.locator(".live-responses-table").inner_text()


def open_principals(page: Page) -> None:
    operation = page.locator(PRINCIPALS)
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()


def shows_every_operation(docs: Page, gateway: Any) -> None:
    """All operations are there, with their roles and examples."""
    with gateway.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    count = sum(len(methods) for methods in paths.values())
    expect(docs.locator(".opblock")).to_have_count(count, timeout=90_000)
    pick = docs.locator("#operations-jobs-pick_job_api_hub_jobs_pick_post")
    pick.locator(".opblock-summary-control").click()
    expect(pick).to_contain_text("Roles: operator, worker (own).")
    expect(pick).to_contain_text("Idempotency-Key")
    expect(pick.locator(".body-param__example")).to_contain_text('"session": "research-1"')
    assert from_elsewhere(docs, gateway.url) == []
    assert docs.evaluate("breaches") == []


# One test, because a browser takes half a minute to make this page.
def test_an_operation_is_tried_with_a_token_that_is_not_stored(docs, gateway):
    shows_every_operation(docs, gateway)
    open_principals(docs)
    assert tried(docs)[0] == 401
    authorize(docs, gateway.operator_token)
    status, shown = tried(docs)
    assert (status, '"principals": [' in shown) == (200, True)
    kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    assert gateway.operator_token not in docs.evaluate(kept)
    assert docs.context.cookies() == []
    docs.goto("about:blank")
    docs.goto(f"{gateway.url}/docs")
    open_principals(docs)
    assert tried(docs)[0] == 401
    assert from_elsewhere(docs, gateway.url) == []
    assert docs.evaluate("breaches") == []


def test_the_page_needs_no_token_and_forbids_other_origins_and_frames(gateway):
    with httpx.Client(base_url=gateway.url, trust_env=False) as client:
        for path, media_type in (
            ("/docs", "text/html"),
            ("/docs/start.js", "text/javascript"),
            ("/docs/swagger-ui-bundle.js", "text/javascript"),
            ("/docs/swagger-ui.css", "text/css"),
        ):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, media_type)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy and "http" not in policy
            again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert client.get("/docs/nothing.js").json()["reason"] == "not_found"
        assert client.get("/docs/..%2Fmodels.py").status_code == 404
