"""The ends of certificates, and their replacement while servers run (HH-25)."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import yaml

from connectors.cli.doctor.machine import check_certificates
from connectors.plumbing.tls_keys.served_certificates import (
    CertificateMetrics,
    CertificateWatch,
    certificate_ends,
    reload_chain,
)
from connectors.plumbing.tls_keys.tls_files import create
from schemas.settings.settings import PROJECT_ROOT, GatewaySettings, Settings
from tests.broker_processes import LOOPBACK, BrokerProcess, wait_until
from tests.connectors.doors.http_api.hub_access import START_S, GatewayProcess
from tests.connectors.doors.http_api.hub_stack import hub_settings

pytestmark = pytest.mark.requirement("HH-25")


def serial_at(port: int) -> int:
    """The serial number of the certificate that a server on this machine has now."""
    from cryptography import x509

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((LOOPBACK, port), 10) as plain, context.wrap_socket(plain) as secure:
        return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"").serial_number


def test_the_first_end_of_each_file_counts_and_files_without_certificates_are_left_out(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert certificate_ends(settings) == {}
    assert check_certificates(settings).level == "ok"
    files = create(settings.tls_path)
    (settings.tls_path / "broken.crt").write_text("-----BEGIN CERTIFICATE-----\n")
    ends = certificate_ends(settings)
    servers = {"gateway.crt", "mosquitto.crt", "kafka.crt", "kafka-internal.crt"}
    assert {path.name for path in ends} == {"ca.crt", *servers}
    assert all(end > datetime.now(UTC) + timedelta(days=300) for end in ends.values())
    both = tmp_path / "both.crt"
    both.write_bytes(files.of("gateway").certificate.read_bytes() + files.of("ca").certificate.read_bytes())
    named = settings.model_copy(update={"gateway": GatewaySettings(ca_certs=both)})
    assert certificate_ends(named)[both] == ends[files.of("gateway").certificate]
    (metric,) = CertificateMetrics(named).collect()
    assert {one.labels["file"] for one in metric.samples} == {path.name for path in ends} | {"both.crt"}


@pytest.mark.parametrize(("days", "level"), [(30, "ok"), (20, "warn"), (-1, "fail")])
def test_doctor_warns_three_weeks_before_the_end_of_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, level: str
) -> None:
    settings = Settings(data_dir=tmp_path)
    create(settings.tls_path)
    first = min(certificate_ends(settings).values())

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return first - timedelta(days=days)

    monkeypatch.setattr("connectors.plumbing.tls_keys.served_certificates.datetime", Clock)
    found = check_certificates(settings)
    assert found.level == level
    assert f"{first:%Y-%m-%d}" in found.found
    assert (level == "ok") != ("tls create --renew" in found.mend)


def test_the_alert_is_on_the_metric_and_its_days() -> None:
    rules = yaml.safe_load((PROJECT_ROOT / "conf" / "alerts.yaml").read_text())["groups"][0]["rules"]
    (rule,) = [one for one in rules if one["alert"] == "TrunklineCertificateEnds"]
    assert rule["expr"] == "trunkline_certificate_end_timestamp_seconds - time() < 21 * 86400"


def test_new_files_are_used_when_certificate_and_key_fit_together(tmp_path: Path) -> None:
    files = create(tmp_path / "one").of("gateway")
    other = create(tmp_path / "two").of("gateway")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert reload_chain(context, files.certificate, files.key)
    calls: list[bool] = []

    def replaced() -> bool:
        calls.append(reload_chain(context, files.certificate, files.key))
        return calls[-1]

    watch = CertificateWatch([files.certificate, files.key], replaced)
    watch.look()
    assert calls == []
    files.certificate.write_bytes(other.certificate.read_bytes())
    watch.look()
    watch.look()
    assert calls == [False]
    files.key.write_bytes(other.key.read_bytes())
    watch.look()
    assert calls == [False, True]
    files.key.unlink()
    watch.look()
    assert calls == [False, True, False]


@pytest.fixture
def gateway(kafka_broker: BrokerProcess, tmp_path: Path) -> Iterator[tuple[GatewayProcess, Settings]]:
    """A gateway that serves HTTPS with a certificate of the stack's own authority."""
    settings = hub_settings(kafka_broker, tmp_path)
    files = create(settings.tls_path)
    pair = files.of("gateway")
    secure = settings.gateway.model_copy(
        update={"certfile": pair.certificate, "keyfile": pair.key, "ca_certs": files.of("ca").certificate}
    )
    settings = settings.model_copy(update={"gateway": secure})
    running = GatewayProcess(settings, tmp_path)
    try:
        running.program.wait_ready(START_S)
        yield running, running.settings
    finally:
        running.program.kill()


@pytest.mark.kafka
def test_a_running_gateway_serves_a_renewed_certificate_and_keeps_its_connections(
    gateway: tuple[GatewayProcess, Settings],
) -> None:
    running, settings = gateway
    port, trusted = settings.gateway.port, ssl.create_default_context(cafile=settings.gateway.ca_certs)
    before = serial_at(port)
    with httpx.Client(base_url=f"https://{LOOPBACK}:{port}", verify=trusted) as kept:
        assert kept.get("/healthz").status_code == 200
        create(settings.tls_path, renew=True)
        wait_until(lambda: serial_at(port) != before, what="the new certificate")
        assert kept.get("/healthz").status_code == 200
    with httpx.Client(base_url=f"https://{LOOPBACK}:{port}", verify=trusted) as new:
        assert new.get("/healthz").status_code == 200
        assert 'trunkline_certificate_end_timestamp_seconds{file="gateway.crt"}' in new.get("/metrics").text
    assert "certificate_replaced" in running.program.log()
