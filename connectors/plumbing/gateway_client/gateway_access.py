"""Access to the gateway: the TLS of its clients and servers, and the operator's token.

The token is in a file with mode 0600 that the gateway makes at its first start.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Final

from schemas.settings.setting_types import is_loopback
from schemas.settings.settings import GatewaySettings, Settings, SettingsError, check_key_file
from schemas.streams.principal.principals import new_token
from trunkline_agent import tls
from trunkline_agent.credentials import CA_VARIABLE
from trunkline_agent.errors import UsageError
from trunkline_agent.private_files import PrivateFileError, make_first, read_private
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


TOKEN_VARIABLE: Final = "TRUNKLINE_TOKEN"  # noqa: S105  a variable's name
_SHORTEST: Final = 32


def ensure_operator_token(settings: Settings) -> str:
    """Return the operator's token from its file. If the file does not exist, write it with a new token first.

    When two gateways start at once, one writes the file and both read it. Raises SettingsError for a file that
    cannot be read or written, that others can read, or that has no valid token.
    """
    path = settings.operator_token_file
    try:
        if not path.exists():
            make_first(path, new_token() + "\n")
        token = read_private(path).decode("ascii").strip()
    except PrivateFileError as error:
        raise SettingsError(f"gateway.operator_token_file: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"gateway.operator_token_file: cannot use {path}: {type(error).__name__}") from None
    if len(token) < _SHORTEST or not token.isprintable() or " " in token:
        raise SettingsError(
            f"gateway.operator_token_file: {path} holds no token; remove it and start the gateway again"
        )
    return token


def read_token(settings: Settings) -> str | None:
    """Return the token for requests to the gateway, from the variable TRUNKLINE_TOKEN or the operator's file.

    The variable comes first. None means that the variable is empty or unset and the file is empty or missing.
    Raises UsageError for a file that cannot be read or that others can read, and for a text that cannot be a
    token.
    """
    found = os.environ.get(TOKEN_VARIABLE, "").strip()
    return _checked(found, TOKEN_VARIABLE) if found else read_token_file(settings.operator_token_file)


def read_token_file(file: Path) -> str | None:
    """Return the token in a file, None if the file is empty or missing.

    Raises UsageError for a file that cannot be read or that others can read, and for a text that cannot be a
    token.
    """
    try:
        found = read_private(file).decode("utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {file}: {type(error).__name__}") from None
    return _checked(found, str(file))


def _checked(found: str, where: str) -> str | None:
    if not found.isascii() or not found.isprintable() or " " in found:
        raise UsageError(f"{where} holds no token: one printable ASCII word")
    return found or None
