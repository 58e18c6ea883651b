"""The address of a hub, its TLS, the texts of its network errors, and the limits of connections to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import urlsplit

from trunkline_agent import tls
from trunkline_agent.credentials import CA_VARIABLE
from trunkline_agent.errors import UsageError
from trunkline_agent.network.proxy import Proxy, proxy_of

if TYPE_CHECKING:
    import ssl

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 20.0
# The gateway sends a comment on a silent stream every 15 s.
SILENCE_S: Final = 45.0
# Requests that may wait long are not counted, so that they never keep an acknowledgement from being sent.
BUSY_MOST: Final = 16
IDLE_MOST: Final = 16


@dataclass(frozen=True)
class HubAddress:
    """The address of a hub.

    Attributes:
        url: The address as it was given.
        host: The host's name or IP address.
        port: The port.
        is_tls: Whether the scheme is https.
        prefix: The path in front of `/api`, without a slash at its end.
        proxy: The HTTP proxy by which the environment says to reach it. None: it is reached without one.
    """

    url: str
    host: str
    port: int
    is_tls: bool
    prefix: str
    proxy: Proxy | None = None

    @classmethod
    def of(cls, url: str) -> Self:
        """Return the address that a URL names. Raises UsageError if it, or its proxy, is none."""
        advice = "the address of a hub is like http://127.0.0.1:3200"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"not the address of a hub: {error}", advice=advice) from None
        if parts.username is not None or parts.password is not None:
            raise UsageError("the address of the hub has a password in it", advice=advice)
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or not is_plain:
            raise UsageError(f"not the address of a hub: {url!r}", advice=advice)
        is_tls = parts.scheme == "https"
        port = port or (443 if is_tls else 80)
        proxy = proxy_of(host, port, is_tls, os.environ)
        return cls(url, host, port, is_tls, parts.path.rstrip("/"), proxy)

    @property
    def peer(self) -> tuple[str, int]:
        """The host and the port to connect to: those of the proxy, if there is one."""
        return (self.host, self.port) if self.proxy is None else (self.proxy.host, self.proxy.port)

    @property
    def authority(self) -> str:
        """The host and the port, as a proxy is asked for them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def host_header(self) -> str:
        """The value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_usual = self.port == (443 if self.is_tls else 80)
        return host if is_usual else f"{host}:{self.port}"

    def trust(self, ca_certs: str | None) -> ssl.SSLContext | None:
        """Return the TLS context that verifies the hub. None for plain HTTP.

        It trusts the authority in the file `ca_certs`, or those of the machine if that is None. Raises
        UsageError if the file cannot be read.
        """
        return tls.trust(self.url, ca_certs)

    def explained(self, error: BaseException | str) -> str:
        """Return the text of a network error, with the address and for a TLS error its likely cause."""
        said = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in said:
            said = (
                f"its certificate is not trusted: {said}; ca_certs of the credentials ({CA_VARIABLE} in the "
                "environment) must be the authority that signed it, and the address a name in it"
            )
        elif "WRONG_VERSION_NUMBER" in said or "RECORD_LAYER_FAILURE" in said:
            said = f"it speaks no HTTPS: {said}"
        by = "" if self.proxy is None else f" by the proxy {self.proxy.url}"
        return f"the hub at {self.url} does not answer{by} ({said})"
