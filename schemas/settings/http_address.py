"""Addresses of HTTP servers in the settings: what a user may give, and what host and port make."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator


def _checked(address: str) -> str:
    parts = urlsplit(address)
    # A port that is no number is found by asking for it.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT")
    return address


HttpAddress = Annotated[str, AfterValidator(_checked)]
"""A text that names scheme and host."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a listener on `host`: 127.0.0.0/8, ::1 or `localhost`.

    Another name is not looked up and counts as not loopback, and so do 0.0.0.0 and ::.
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def address_at(scheme: str, host: str, port: int) -> str:
    """The address of a server on this host, which may be one of IPv6."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
