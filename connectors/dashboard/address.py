"""The address of the dashboard, for people and for programs that show it to them."""

from __future__ import annotations

from schemas.settings.setting_types import address_at
from schemas.settings.settings import Settings


def address_of(settings: Settings) -> str:
    """Return the URL at which a browser on this machine finds the dashboard.

    The caller checks that `dashboard.port` is not 0, which means that there is no dashboard.
    """
    host = settings.dashboard.host
    if host in ("0.0.0.0", "::"):  # noqa: S104  a wildcard includes this machine
        host = "127.0.0.1"
    return f"{address_at(settings.http_scheme, host, settings.dashboard.port)}/"
