"""Access to the dashboard: tokens, cookies, Host and Origin, and the headers for browsers."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from connectors.cli.main import main
from connectors.doors.dashboard.application import Guard
from connectors.doors.dashboard.entrance import SESSION_S, Logins
from connectors.hub.live.live_view import LiveView
from connectors.hub.serving.identities import Identities, Unidentified
from connectors.hub.serving.policy import Caller
from schemas.keys.sealing import Keyring
from schemas.settings.setting_types import host_names_of
from schemas.settings.settings import DashboardSettings, load_settings, settings_environment
from tests.broker_processes import LOOPBACK, ProgramProcess, free_port, wait_until
from tests.connectors.doors.dashboard.event_reading import Seen, followed
from tests.connectors.doors.http_api.hub_access import add_principal

ROUTES = (
    "/api/snapshot",
    "/api/agents",
    "/api/events",
    "/api/jobs",
    "/api/jobs/0a0a0a0a",
    "/api/agents/echo",
    "/api/tasks",
    "/api/tasks/0a0a0a0a",
    "/api/mailboxes",
    "/api/mailboxes/default/operator",
    "/api/mailboxes/default/operator/messages/0a0a0a0a",
    "/api/rejections",
    "/api/records/0/0",
)


def log_in(client, token):
    return client.post(
        "/api/login", json={"token": token}, headers={"Origin": str(client.base_url).rstrip("/")}
    )


@pytest.mark.requirement("AM-13")
def test_nothing_is_told_without_a_token_that_may_look(dashboard, operator):
    workers = add_principal(operator, "wilma", "worker")
    viewers = add_principal(operator, "vera", "viewer")
    for token, status in (("", 401), ("x" * 43, 401), (workers, 403)):
        with dashboard.watcher(token) as client:
            for route in ROUTES:
                assert client.get(route).status_code == status, route
            assert log_in(client, token or "y" * 43).status_code == status
            assert client.get("/").status_code == 200
    with dashboard.watcher(viewers) as vera:
        assert vera.get("/api/snapshot").json()["role"] == "viewer"


@pytest.mark.requirement("AM-13")
def test_a_login_gives_a_cookie_that_no_script_reads_and_that_opens_nothing_but_the_dashboard(dashboard):
    with dashboard.watcher("") as browser:
        answer = log_in(browser, dashboard.operator_token)
        found = answer.json()
        assert len(found.pop("change_key")) == 64
        assert found == {"principal": "operator", "role": "operator"}
        cookie = answer.headers["set-cookie"]
        assert {part.strip() for part in cookie.split(";")[1:]} == {
            f"Max-Age={SESSION_S}",
            "Path=/",
            "HttpOnly",
            "SameSite=Strict",
        }
        assert dashboard.operator_token not in cookie
        assert browser.get("/api/snapshot").status_code == 200
        name, _, value = cookie.partition(";")[0].partition("=")
        with dashboard.client(value) as hub:
            assert hub.get("/api/hub/jobs").status_code == 401
        for forged in (value[:-1] + ("0" if value[-1] != "0" else "1"), "x", "9:operator:y:z", ":::", "é"):
            raw = {"Cookie": f"{name}={forged}".encode()}
            assert httpx.get(f"{dashboard.page}/api/agents", headers=raw, trust_env=False).status_code == 401
        assert browser.post("/api/logout", headers={"Origin": dashboard.page}).status_code == 200
        assert browser.get("/api/snapshot").status_code == 401


def test_a_cookie_is_good_at_every_gateway_until_its_token_is_revoked(dashboard, start_dashboard, operator):
    token = add_principal(operator, "vera", "viewer")
    second = start_dashboard()
    with dashboard.watcher("") as browser, second.watcher("") as other:
        log_in(browser, token)
        (_, value), *_ = browser.cookies.items()
        other.cookies.set(f"trunkline_{second.settings.dashboard.port}", value)
        assert other.get("/api/snapshot").json()["principal"] == "vera"
        with followed(browser) as events:
            Seen(events).until(lambda s: s.events)
            operator.post("/api/hub/principals/vera/revoke", json={})
            # It ends by itself, well before these events give up.
            assert {event.name for event in events} <= {"pulse", "verdict"}
        assert browser.get("/api/snapshot").status_code == 401
        wait_until(lambda: other.get("/api/snapshot").status_code == 401, what="the other gateway knows, too")


def test_a_cookie_lives_a_week_and_dies_with_the_operators_token(backbone_settings, keyring):
    now = [1_000_000.0]
    view = LiveView(backbone_settings, keyring)

    def logins(token):
        return Logins(keyring, Identities(token), token, view, lambda: now[0])

    caller, cookie = logins("a" * 43).cookie_for("a" * 43)
    assert caller == logins("a" * 43).caller_of(None, cookie) == Caller("operator", "operator")
    assert isinstance(logins("b" * 43).caller_of(None, cookie), Unidentified)
    now[0] += SESSION_S + 1
    assert isinstance(logins("a" * 43).caller_of(None, cookie), Unidentified)


def test_after_the_master_key_was_rotated_whoever_looks_logs_in_again(backbone_settings):
    token = "a" * 43

    def logins(keyring):
        return Logins(keyring, Identities(token), token, LiveView(backbone_settings, keyring))

    before, after = bytes(range(32)), bytes(range(32, 64))
    _, cookie = logins(Keyring({"first": before}, "first")).cookie_for(token)
    added = logins(Keyring({"first": before, "second": after}, "first"))
    assert added.caller_of(None, cookie) == Caller("operator", "operator"), "a key that does not seal yet"
    rotated = logins(Keyring({"first": before, "second": after}, "second"))
    refused = rotated.caller_of(None, cookie)
    assert isinstance(refused, Unidentified) and "log in again" in refused.why
    _, new = rotated.cookie_for(token)
    assert rotated.caller_of(None, new) == Caller("operator", "operator")


@pytest.mark.requirement("AM-13")
def test_requests_under_another_host_or_from_another_origin_are_refused(dashboard, watcher):
    port = dashboard.settings.dashboard.port
    ours = f"{LOOPBACK}:{port}"
    for host in (
        "evil.example",
        f"evil.example:{port}",
        f"{LOOPBACK}:{port + 1}",
        LOOPBACK,
        f"{ours}.evil.example",
        f"trunk.test:{port}",
        f"localhost..:{port}",
    ):
        for route in ("/", "/page/main.js", *ROUTES):
            answer = watcher.get(route, headers={"Host": host})
            assert (answer.status_code, answer.json()["reason"]) == (403, "policy"), (host, route)
    for host in (ours, f"localhost:{port}", f"LOCALHOST:{port}", f"localhost.:{port}", f"[::1]:{port}"):
        assert watcher.get("/api/agents", headers={"Host": host}).status_code == 200
    for origin in ("http://evil.example", "null", f"http://{LOOPBACK}:{port + 1}", f"https://{ours}"):
        assert watcher.get("/api/agents", headers={"Origin": origin}).status_code == 403, origin
        assert watcher.post("/api/login", json={}, headers={"Origin": origin}).status_code == 403, origin
    for site in ("cross-site", "same-site"):
        fetched = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
        assert watcher.get("/api/agents", headers=fetched).status_code == 403
        assert watcher.get("/", headers={**fetched, "Sec-Fetch-Mode": "navigate"}).status_code == 200
    assert watcher.get("/api/agents", headers={"Origin": f"http://{ours}"}).status_code == 200


@pytest.mark.requirement("HH-21")
def test_head_is_answered_by_the_dashboard_as_get_without_the_body(dashboard):
    with dashboard.watcher("") as browser:
        for route in ("/", "/page/main.js", "/healthz", "/api/agents", "/nothing"):
            got, head = browser.get(route), browser.head(route)
            assert (head.status_code, head.content) == (got.status_code, b""), route
            kinds = [answer.headers["content-type"] for answer in (head, got)]
            assert kinds[0] == kinds[1], route


@pytest.mark.requirement("HH-20")
def test_the_dashboard_answers_under_the_further_names_of_the_settings():
    async def page(scope, receive, send):
        await PlainTextResponse("page")(scope, receive, send)

    guarded = Guard(page, LOOPBACK, 3000, names=host_names_of("trunk.test, 10.0.0.7,fd00::7"))
    client = TestClient(guarded, base_url="http://trunk.test")
    for host in ("trunk.test", "TRUNK.test.:8443", "10.0.0.7:80", "[fd00::7]:1"):
        assert client.get("/", headers={"Host": host}).status_code == 200, host
        for scheme in ("http", "https"):
            origin = {"Host": host, "Origin": f"{scheme}://{host}"}
            assert client.get("/", headers=origin).status_code == 200, origin
    for host in ("other.test", "trunk.test.evil.example", f"{LOOPBACK}:3001"):
        answer = client.get("/", headers={"Host": host})
        assert answer.status_code == 403
        assert "gateway.host_names" in answer.json()["message"]
    assert client.get("/", headers={"Host": "trunk.test", "Origin": "https://evil.test"}).status_code == 403


def test_a_request_without_a_host_or_with_two_is_refused(dashboard):
    port = dashboard.settings.dashboard.port
    for lines in ("", f"Host: {LOOPBACK}:{port}\r\nHost: {LOOPBACK}:{port}\r\n"):
        with socket.create_connection((LOOPBACK, port), timeout=10) as raw:
            raw.sendall(f"GET / HTTP/1.0\r\n{lines}\r\n".encode())
            assert raw.recv(4096).split(b" ")[1] in (b"400", b"403")


@pytest.mark.requirement("AM-13")
def test_every_answer_tells_the_browser_to_allow_nothing_but_our_own_files(dashboard, watcher):
    for route in ("/", "/page/main.js", "/page/style.css", "/page/icon.svg", "/nothing", *ROUTES):
        with watcher.stream("GET", route) as answer:
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'", route
            assert policy["frame-ancestors"] == "'none'" and "unsafe" not in str(policy)
            assert answer.headers["x-content-type-options"] == "nosniff"
            kept = "no-cache" if route == "/" or "/page/" in route else "no-store"
            assert answer.headers["cache-control"] == kept, route
            assert "access-control-allow-origin" not in answer.headers


def test_only_the_pages_own_files_are_served(dashboard, watcher):
    page = watcher.get("/")
    assert "http:" not in page.text and "https:" not in page.text and "<script>" not in page.text
    etag = watcher.get("/page/main.js").headers["etag"]
    assert watcher.get("/page/main.js", headers={"If-None-Match": etag}).status_code == 304
    for name in ("../application.py", "%2e%2e%2fapplication.py", "index.html/", "", ".."):
        assert watcher.get(f"/page/{name}").status_code in (404, 405) or name == ".."
    for body in (b"[]", b"{}", b'{"token": 1}', b'{"token": ""}', b'{"a":1,"a":2}', b"\xff"):
        answer = watcher.post("/api/login", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, body
    assert watcher.post("/api/login", content=b'{"token": "x"}').status_code == 400


def test_no_token_is_in_the_log_and_the_gateway_ends_in_order_with_pages_open(dashboard):
    with dashboard.watcher("") as browser:
        log_in(browser, dashboard.operator_token)
        cookie = next(iter(browser.cookies.values()))
        with browser.stream("GET", "/api/events") as events:
            lines = events.iter_lines()
            next(lines)
            assert dashboard.program.stop() == 0
            list(lines)
    log = dashboard.program.log()
    assert "/api/login" in log
    assert dashboard.operator_token not in log and cookie not in log


@pytest.mark.requirement("AM-11")
def test_the_port_is_a_setting_with_an_alias_and_zero_closes_the_door(backbone_settings, dashboard, tmp_path):
    assert load_settings({}).dashboard == DashboardSettings(host=LOOPBACK, port=3000)
    assert load_settings({"HTTP_PORT": "3007"}).dashboard.port == 3007
    both = {"HTTP_PORT": "3007", "TRUNKLINE__DASHBOARD__PORT": "3008"}
    assert load_settings(both).dashboard.port == 3008
    taken = dashboard.settings.model_copy(
        update={"gateway": dashboard.settings.gateway.model_copy(update={"port": free_port()})}
    )
    second = ProgramProcess("connectors.programs.gateway_program", taken, tmp_path, "second")
    assert second.process.wait(60) == 1
    assert "dashboard.port" in second.log()
    closed = taken.model_copy(update={"dashboard": DashboardSettings(port=0)})
    third = ProgramProcess("connectors.programs.gateway_program", closed, tmp_path, "third")
    third.wait_ready()
    doors = [json.loads(line).get("door") for line in third.log().splitlines() if '"serving"' in line]
    assert third.stop() == 0 and doors == ["hub"]


def test_the_command_prints_the_address_that_logs_in(dashboard, capsys, monkeypatch):
    for name, value in settings_environment(dashboard.settings).items():
        monkeypatch.setenv(name, value)
    assert main(["dashboard"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{dashboard.page}/#token={dashboard.operator_token}\n" and told.err == ""
    assert main(["dashboard", "--no-token"]) == 0
    assert capsys.readouterr().out == f"{dashboard.page}/\n"
    monkeypatch.setenv("TRUNKLINE__DASHBOARD__PORT", str(free_port()))
    assert main(["dashboard"]) == 0 and "trunkline up" in capsys.readouterr().err
    monkeypatch.setenv("TRUNKLINE__DASHBOARD__PORT", "0")
    assert main(["dashboard"]) == 2 and "dashboard.port" in capsys.readouterr().err
