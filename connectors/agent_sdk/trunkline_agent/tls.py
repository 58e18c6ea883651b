"""TLS of a client: the certificates that it trusts, and error texts that say what to set."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from trunkline_agent.credentials import CA_VARIABLE
from trunkline_agent.errors import UsageError

if TYPE_CHECKING:
    import ssl

_THIS_MACHINE: Final = ("127.0.0.1", "localhost", "::1")


def trust(url: str, ca_certs: Path | str | None) -> ssl.SSLContext | None:
    """Return the TLS context with which a client verifies the server at `url`, None for plain HTTP.

    The client then trusts the certificate authority in the file `ca_certs`; None: the authorities that this
    machine trusts. Raises UsageError when the file cannot be read.
    """
    if urlsplit(url).scheme != "https":
        return None
    return _trusting(None if ca_certs is None else str(ca_certs))


def is_on_this_machine(url: str) -> bool:
    """Return whether `url` is on this machine, so that no proxy of the environment may be used for it."""
    return urlsplit(url).hostname in _THIS_MACHINE


def explained(error: BaseException | str) -> str:
    """Return the text of a failed request's error. For a TLS error it also names the setting to check.

    `error` is the exception or its text.
    """
    said = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return (
            f"its certificate is not trusted: {said}; gateway.ca_certs (for an agent {CA_VARIABLE}) must be "
            "the authority that signed it, and the address a name in it"
        )
    if "WRONG_VERSION_NUMBER" in said or "RECORD_LAYER_FAILURE" in said:
        return f"it speaks no HTTPS: {said}; look at gateway.url and gateway.certfile"
    if "disconnected without sending" in said or "Empty reply" in said:
        return f"{said}; perhaps it speaks HTTPS alone: look at gateway.url and gateway.certfile"
    return said


@lru_cache(maxsize=8)
def _trusting(ca_certs: str | None) -> ssl.SSLContext:
    import ssl  # takes 15 ms, which plain HTTP need not spend

    try:
        return ssl.create_default_context(cafile=ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"ca_certs: {ca_certs}: {error}") from None
