"""Fixtures of the dashboard's tests: gateways with a dashboard on the session's Kafka, and Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from connectors.log.publisher import Publisher
from schemas.settings.settings import Settings
from tests.connectors.doors.dashboard.dashboard_process import DashboardProcess
from tests.connectors.doors.http_api.hub_access import starting
from tests.programs import required_program

# The page asks again every two seconds, and what it asks for may take its time on a busy machine.
EXPECT_MS = 20_000
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def start_dashboard(backbone_settings: Settings, tmp_path: Path) -> Iterator[Callable[..., DashboardProcess]]:
    """Starts gateways with a dashboard on free ports and waits until they serve; all end with the test."""
    with starting(DashboardProcess, backbone_settings, tmp_path) as start:
        yield start


@pytest.fixture
def dashboard(start_dashboard: Callable[..., DashboardProcess]) -> DashboardProcess:
    """One running gateway with a dashboard."""
    return start_dashboard()


@pytest.fixture
def operator(dashboard: DashboardProcess) -> Iterator[httpx.Client]:
    """A client of the hub with the operator's token."""
    with dashboard.client() as client:
        yield client


@pytest.fixture
def watcher(dashboard: DashboardProcess) -> Iterator[httpx.Client]:
    """A client of the dashboard with the operator's token."""
    with dashboard.watcher() as client:
        yield client


@pytest.fixture
def publisher(backbone_settings: Settings) -> Iterator[Publisher]:
    """A publisher beside the gateway."""
    with Publisher(backbone_settings) as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A real browser."""
    expect.set_options(timeout=EXPECT_MS)
    program = required_program("chromium", *CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            # A container has no sandbox for root, and little shared memory.
            args=["--no-sandbox", "--disable-dev-shm-usage"],
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address in a browser of its own; at the end nothing may stand in its console as an error."""
    contexts: list[Any] = []
    faults: list[str] = []

    def open_(address: str, **options: Any) -> Page:
        context = chromium.new_context(**{"viewport": {"width": 1360, "height": 860}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert faults == []
