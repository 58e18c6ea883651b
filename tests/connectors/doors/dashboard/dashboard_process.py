"""A gateway with its dashboard, and what tests do at its log."""

from __future__ import annotations

from pathlib import Path

import httpx

from schemas.settings.settings import DashboardSettings, Settings
from tests.broker_processes import LOOPBACK, free_port
from tests.connectors.doors.http_api.hub_access import TIMEOUT_S, GatewayProcess


class DashboardProcess(GatewayProcess):
    """One running gateway whose dashboard has a port."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        port = free_port()
        self.page = f"http://{LOOPBACK}:{port}"
        super().__init__(settings.model_copy(update={"dashboard": DashboardSettings(port=port)}), folder)

    def watcher(self, token: str | None = None) -> httpx.Client:
        """A client of the dashboard with this token; None: the operator's; "": none."""
        client = self.client(token)
        client.close()
        return httpx.Client(base_url=self.page, headers=client.headers, timeout=TIMEOUT_S, trust_env=False)

    @property
    def address(self) -> str:
        """The address that logs a browser in."""
        return f"{self.page}/#token={self.operator_token}"
