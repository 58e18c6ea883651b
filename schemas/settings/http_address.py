"""Addresses of HTTP servers in the settings."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator


def _checked(address: str) -> str:
    parts = urlsplit(address)
    # `parts.port` raises ValueError for a port that is not a number.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT")
    return address


HttpAddress = Annotated[str, AfterValidator(_checked)]
"""A URL with scheme and host."""


def is_loopback(host: str) -> bool:
    """Return whether `host` is 127.0.0.0/8, ::1 or `localhost`, so that only this machine reaches it.

    Other names are not looked up and count as not loopback, and so do 0.0.0.0 and ::.
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def address_at(scheme: str, host: str, port: int) -> str:
    """Return the URL of the server on `host` and `port`. Puts an IPv6 address into brackets."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
