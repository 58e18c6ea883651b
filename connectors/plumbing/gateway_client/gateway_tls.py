"""TLS of the gateway: the certificates that clients trust and that its servers present, and error texts."""

from __future__ import annotations

import ssl
from pathlib import Path

from schemas.keys.private_files import check_key_file
from schemas.settings.setting_types import is_loopback
from schemas.settings.settings import GatewaySettings, Settings, SettingsError
from trunkline_agent import tls
from trunkline_agent.environment import CA_VARIABLE
from trunkline_agent.errors import UsageError
from trunkline_agent.tls import explained

__all__ = [
    "CA_VARIABLE",
    "check_listeners",
    "explained",
    "listener_context",
    "open_plain_listeners",
    "trust",
]


def trust(url: str, ca_certs: Path | str | None) -> ssl.SSLContext | None:
    """Return the TLS context with which a client verifies the gateway at `url`, None for plain HTTP.

    The client then trusts the certificate authority in the file `ca_certs`; None: the authorities that this
    machine trusts. Raises SettingsError when the file cannot be read.
    """
    try:
        return tls.trust(url, ca_certs)
    except UsageError as error:
        raise SettingsError(f"gateway.{error}") from None


def listener_context(gateway: GatewaySettings) -> ssl.SSLContext | None:
    """Return the TLS context with which the gateway serves HTTPS (TLS 1.2 and later).

    Returns None, which means plain HTTP, when `gateway.certfile` is not set. Raises SettingsError for a file
    that cannot be read, for a private key that others can read, and for `gateway.keyfile` without
    `gateway.certfile`.
    """
    if gateway.certfile is None:
        if gateway.keyfile is not None:
            raise SettingsError("gateway.keyfile is set, and gateway.certfile is not")
        return None
    check_key_file("gateway.", gateway.certfile, gateway.keyfile)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(gateway.certfile, gateway.keyfile)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"gateway.certfile or gateway.keyfile: {error}") from None
    return context


def open_plain_listeners(settings: Settings) -> dict[str, str]:
    """Return the gateway's addresses that other machines can reach and that have no TLS, by name of setting.

    An example is `{"gateway.host": "0.0.0.0"}`. Empty means that TLS is on, or that all addresses are on
    loopback.
    """
    if settings.gateway.certfile is not None:
        return {}
    listeners = {"gateway.host": settings.gateway.host}
    if settings.agent_mcp.port:
        listeners["agent_mcp.host"] = settings.agent_mcp.host
    if settings.dashboard.port:
        listeners["dashboard.host"] = settings.dashboard.host
    return {setting: host for setting, host in listeners.items() if not is_loopback(host)}


def check_listeners(settings: Settings) -> None:
    """Raise SettingsError when other machines could send tokens to the gateway without TLS.

    The setting `gateway.allow_plaintext` turns this check off.
    """
    if settings.gateway.allow_plaintext:
        return
    for setting, host in open_plain_listeners(settings).items():
        raise SettingsError(
            f"{setting} is {host!r}: other machines would reach this listener without TLS, and send tokens "
            "in clear. Set gateway.certfile and gateway.keyfile (./trunkline tls create makes them); or, if a "
            "proxy in front does TLS and nobody else reaches this address, set gateway.allow_plaintext: true"
        )
