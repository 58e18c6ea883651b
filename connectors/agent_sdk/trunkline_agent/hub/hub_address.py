"""The address of a hub, the HTTP proxy on the way to it, its TLS, and the limits of connections to it.

The proxy comes from the variables of the environment that curl reads. The library for JavaScript follows the
same rules. Both are tested with `proxies` of connectors/agent_sdk/vectors/hub.json.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import unquote, urlsplit

from trunkline_agent import tls
from trunkline_agent.credentials import CA_VARIABLE
from trunkline_agent.errors import UsageError

if TYPE_CHECKING:
    import ssl

_HEAD_BYTES_MOST: Final = 64 * 1024
_PORT: Final = 80
_WITH_PORT: Final = re.compile(r"(?P<name>\[[^]]*\]|[^:]*):(?P<port>[0-9]+)")
CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 20.0
# The gateway sends a comment on a silent stream every 15 s.
SILENCE_S: Final = 45.0
# Requests that may wait long are not counted, so that they never keep an acknowledgement from being sent.
BUSY_MOST: Final = 16
IDLE_MOST: Final = 16


class ProxyFault(OSError):
    """The proxy made no connection to the hub."""


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy.

    Attributes:
        host: Its name or IP address.
        port: Its port.
        authorization: The value of the header `Proxy-Authorization`. None: it asks for no login.
    """

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Its address, without user and password."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def connect_request(self, target: str) -> bytes:
        """Return the request that asks for a connection to `target`, a host and a port (RFC 9110, 9.3.6)."""
        login = "" if self.authorization is None else f"Proxy-Authorization: {self.authorization}\r\n"
        return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{login}\r\n".encode("ascii")

    def is_connected(self, answer: bytes) -> bool:
        """Return whether the bytes of the answer to `connect_request` are complete. Raises ProxyFault."""
        head, end, _ = answer.partition(b"\r\n\r\n")
        if not end:
            if len(answer) > _HEAD_BYTES_MOST:
                raise ProxyFault("the proxy's answer to CONNECT has no end")
            return False
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            raise ProxyFault("the proxy's answer to CONNECT is not HTTP")
        if not 200 <= int(words[1]) < 300:
            said = " ".join(words[1:])[:100]
            raise ProxyFault(
                "the proxy refused CONNECT: " + "".join(c if c.isprintable() else "?" for c in said)
            )
        return True


def proxy_of(host: str, port: int, is_tls: bool, environment: Mapping[str, str]) -> Proxy | None:
    """Return the proxy for a server, None if it is reached without one.

    The variables are `https_proxy` or `http_proxy`, else `all_proxy`, and `no_proxy`; each also in capitals,
    and in small letters first. An empty one means none. `HTTP_PROXY` does not count in a CGI program, where a
    client of the web server sets it by a header. Loopback never has a proxy.

    Raises:
        UsageError: The variable is no address of an HTTP proxy.
    """
    host = host.lower().rstrip(".")
    if _is_loopback(host):
        return None
    names = ["https_proxy", "HTTPS_PROXY"] if is_tls else ["http_proxy"]
    if not is_tls and "REQUEST_METHOD" not in environment:
        names.append("HTTP_PROXY")
    name = next((one for one in (*names, "all_proxy", "ALL_PROXY") if one in environment), None)
    if name is None or not environment[name] or _is_excluded(host, port, environment):
        return None
    given = environment[name]
    try:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        found, its_port = parts.hostname, parts.port or _PORT
    except ValueError:
        found = None
    if not found or parts.scheme != "http" or not found.isascii():
        # Without the address, which may have a password.
        raise UsageError(
            f"{name} in the environment is not the address of an HTTP proxy",
            advice="it is like http://proxy.example:3128; NO_PROXY names the hosts that need none",
        )
    login = None
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        login = f"Basic {b64encode(user.encode()).decode('ascii')}"
    return Proxy(found, its_port, login)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.endswith(".localhost") or _is_in("127.0.0.0/8", host)


def _is_excluded(host: str, port: int, environment: Mapping[str, str]) -> bool:
    """Return whether `no_proxy` names a host: by name, domain, IP address or network, maybe with a port."""
    given = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    for entry in given.replace(",", " ").lower().split():
        found = _WITH_PORT.fullmatch(entry)
        if found is not None and int(found["port"]) != port:
            continue
        name = (entry if found is None else found["name"]).strip("[]").removeprefix("*.").strip(".")
        if name in ("*", host) or host.endswith(f".{name}") or _is_in(name, host):
            return True
    return False


def _is_in(network: str, host: str) -> bool:
    """Return whether a host is an IP address in a network such as `10.0.0.0/8`."""
    # Names are the usual case, and the module takes a while to import.
    if not (host[:1].isdigit() or ":" in host) or not (network[:1].isdigit() or ":" in network):
        return False
    from ipaddress import ip_address, ip_network

    try:
        return ip_address(host) in ip_network(network, strict=False)
    except ValueError:
        return False


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
