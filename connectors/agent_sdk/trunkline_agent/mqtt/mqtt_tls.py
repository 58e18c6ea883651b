"""TLS for connections to an MQTT broker: the context from its files, and explanations of its errors."""

from __future__ import annotations

import ssl
from functools import lru_cache
from pathlib import Path

from trunkline_agent.broker import BrokerAccess
from trunkline_agent.errors import UsageError
from trunkline_agent.private_files import PrivateFileError, check_private


class _Connection(ssl.SSLSocket):
    """A connection that is closed when its handshake fails. paho would leave it open."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError:
            self.close()
            raise


def mqtt_context(mqtt: BrokerAccess) -> ssl.SSLContext | None:
    """Return the TLS context for connections to the broker in `mqtt`, None when `mqtt.tls` is off.

    Certificate files are read again when they have changed. Raises UsageError for certificates that cannot
    be read, and for a private key that others can read.
    """
    if not mqtt.tls:
        return None
    # Checked each time: a change of the mode does not change the time of the file.
    if mqtt.certfile is not None:
        path, name = (mqtt.certfile, "certfile") if mqtt.keyfile is None else (mqtt.keyfile, "keyfile")
        try:
            check_private(path)
        except PrivateFileError as error:
            raise UsageError(f"mqtt.{name}: {error}") from None
        except OSError:
            pass  # the context says which file is missing
    # Files may be replaced while the program runs: they are read again when their time has changed.
    files = (mqtt.ca_certs, mqtt.certfile, mqtt.keyfile)
    return _context(*files, tuple(_changed_at(file) for file in files))


def explained(error: Exception, mqtt: BrokerAccess) -> str:
    """Return the text of an error of a connection to an MQTT broker, for an error message.

    For a TLS error the text names the setting to check. `mqtt` is not used for other errors.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({error.verify_message}): mqtt.ca_certs must be the authority "
            "that signed it, and mqtt.host a name in it"
        )
    if isinstance(error, ssl.SSLError):
        if "alert" in (error.reason or "").lower():
            return f"it ended TLS ({error.reason}): perhaps it wants mqtt.certfile and mqtt.keyfile"
        return f"no TLS ({error.reason or error}): perhaps this port has no TLS, then unset mqtt.tls"
    return str(error)


def why_no_answer(mqtt: BrokerAccess) -> str:
    """Return a hint for the error text about a broker that closes the connection before it answers the login.

    The hint starts with a semicolon and names the TLS settings to check. It is empty when TLS seems right.
    """
    if not mqtt.tls:
        return "; perhaps it wants TLS, then set mqtt.tls and mqtt.ca_certs"
    return "; perhaps it wants mqtt.certfile and mqtt.keyfile" if mqtt.certfile is None else ""


@lru_cache(maxsize=32)
def _context(
    ca_certs: Path | None, certfile: Path | None, keyfile: Path | None, _changed: tuple[int, ...]
) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(ca_certs) if ca_certs else None)
        context.sslsocket_class = _Connection
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certfile is not None:
            context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"mqtt.ca_certs, mqtt.certfile or mqtt.keyfile: {error}") from error
    return context


def _changed_at(path: Path | None) -> int:
    try:
        return 0 if path is None else path.stat().st_mtime_ns
    except OSError:
        return 0
