"""The dashboard's URL, for people and for programs that print it."""

from __future__ import annotations

from schemas.settings.setting_types import address_at
from schemas.settings.settings import Settings


def address_of(settings: Settings) -> str:
    """Return the URL of the dashboard for a browser on this machine, with a slash at the end.

    Do not call this function if `dashboard.port` is 0: then there is no dashboard, and the URL is useless.
    """
    host = settings.dashboard.host
    if host in ("0.0.0.0", "::"):  # noqa: S104  a wildcard includes this machine
        host = "127.0.0.1"
    return f"{address_at(settings.http_scheme, host, settings.dashboard.port)}/"
