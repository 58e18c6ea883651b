"""The first check of a request to the dashboard (AM-13): its Host and Origin. It also adds security headers.

A page of another site, in the same browser, may send requests to a loopback port from any origin. With DNS
rebinding it may do so under any name that resolves to that port's address. Such a request is answered with 403.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from connectors.hub.serving.answers import error_response
from connectors.hub.serving.strict_request import LOOPBACK_NAMES, NOT_KNOWN, HostNames, name_and_port
from trunkline_agent.wire.verdicts import POLICY

_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104  compared, not bound
_USUAL_PORTS: Final = {"http": 80, "https": 443}
_OUR_SITES: Final = ("same-origin", "none")

_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


class Guard:
    """ASGI middleware that answers requests of other sites with 403, and adds security headers to all answers.

    It wraps the dashboard's application. `scheme`, `host` and `port` are the address that the dashboard listens
    on. `names` are further host names under which browsers reach it, through a proxy: on any port, by HTTP or
    HTTPS.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, scheme: str = "http", names: Iterable[str] = ()
    ) -> None:
        self._app = app
        self._is_wildcard = host in _WILDCARDS
        self._scheme = scheme
        self._ports = {str(port), *([""] if port == _USUAL_PORTS[scheme] else [])}
        self._hosts = HostNames((*LOOPBACK_NAMES, host))
        self._further = HostNames(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of another site with 403, and pass any other request on to the application.

        Every answer gets the security headers, such as `content-security-policy`.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        why = self._why_not(scope)
        if why is None:
            await self._app(scope, receive, with_headers)
        else:
            await error_response(403, POLICY, why)(scope, receive, with_headers)

    def _why_not(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        hosts = [name_and_port(host) for host in headers.getlist("host")]
        if len(hosts) != 1 or not self._is_ours(hosts[0], scope):
            return f"the dashboard does not answer under this Host; {NOT_KNOWN}"
        schemes = ("http", "https") if hosts[0][0] in self._further else (self._scheme,)
        for origin in headers.getlist("origin"):
            found, _, host = origin.partition("://")
            if found.lower() not in schemes or name_and_port(host) != hosts[0]:
                return "the dashboard does not answer to pages of another Origin"
        site, mode = headers.getlist("sec-fetch-site"), headers.getlist("sec-fetch-mode")
        # A link of another site may lead to the page itself, which shows nothing before it has asked for its
        # data.
        if site and site[-1] not in _OUR_SITES and not (scope["path"] == "/" and mode[-1:] == ["navigate"]):
            return "the dashboard does not answer to pages of another site"
        return None

    def _is_ours(self, host: tuple[str, str], scope: Scope) -> bool:
        name, port = host
        if name in self._further:
            return True
        if port not in self._ports:
            return False
        server = scope.get("server")
        # An IP address is safe: only names can be made to resolve to another address.
        return name in self._hosts or (
            self._is_wildcard and server is not None and name in HostNames((server[0],))
        )
