"""The certificates of the stack's servers and clients: their ends, and their replacement while they serve."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from schemas.settings.settings import PROJECT_ROOT, Settings

log = structlog.stdlib.get_logger(__name__)

WARN_DAYS: Final = 21
"""A certificate that ends sooner is reported."""


def certificate_ends(settings: Settings) -> dict[Path, datetime]:
    """Return when each certificate file that the settings name, or the stack's own authority made, ends in UTC.

    Of a file with several certificates, the first end counts. A file that is missing or has no certificate is
    left out, because the part that needs it reports that.
    """
    named = (
        settings.gateway.certfile,
        settings.gateway.ca_certs,
        settings.mqtt.certfile,
        settings.mqtt.ca_certs,
        settings.kafka.ssl_certfile,
        settings.kafka.ssl_ca_certs,
        settings.webhooks.ca_certs,
    )
    made = sorted(settings.tls_path.glob("**/*.crt"))
    files = dict.fromkeys([*(PROJECT_ROOT / path for path in named if path is not None), *made])
    ends = {path: _first_end(path) for path in files}
    return {path: end for path, end in ends.items() if end is not None}


def _first_end(path: Path) -> datetime | None:
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return None
    return min((one.not_valid_after_utc for one in found), default=None)


def days_left(end: datetime) -> float:
    """Return the days until a certificate ends, negative after its end."""
    return (end - datetime.now(UTC)).total_seconds() / 86_400


class CertificateMetrics:
    """The metric with the ends of all certificates. Prometheus reads it at each scrape."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def collect(self) -> Iterable[Metric]:
        """Yield `trunkline_certificate_end_timestamp_seconds` with the file's name as its label."""
        text = "When a certificate ends, in seconds since 1970 UTC."
        family = GaugeMetricFamily("trunkline_certificate_end_timestamp_seconds", text, labels=["file"])
        for path, end in certificate_ends(self._settings).items():
            family.add_metric([path.name], end.timestamp())
        yield family


class CertificateWatch:
    """Calls a function when the files of a certificate were replaced.

    Args:
        files: The files. Their contents belong together, so all may be replaced one after the other.
        replaced: Called by `look` after a change. It returns whether the new files are in use. If not, it is
            called again after the next change.
    """

    def __init__(self, files: Iterable[Path], replaced: Callable[[], bool]) -> None:
        self._files = tuple(files)
        self._replaced = replaced
        self._seen = self._signature()

    def look(self) -> None:
        """Look at the files. It costs one call of the system for each, so it may be called each second."""
        found = self._signature()
        if found == self._seen:
            return
        self._seen = found
        names = [path.name for path in self._files]
        if self._replaced():
            log.info("certificate_replaced", files=names)
        else:
            log.warning("certificate_not_replaced", files=names, why="the new files cannot be used together")

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_signature_of(path) for path in self._files)


def _signature_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def reload_chain(context: ssl.SSLContext, certfile: Path, keyfile: Path | None) -> bool:
    """Load a certificate with its key into the context of a running server. Return whether they fit together.

    New connections get the new certificate. If the two do not fit, the context keeps the earlier one.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError):
        return False
    return True
