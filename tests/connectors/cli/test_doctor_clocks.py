"""The doctor's check of clocks that are apart (ST-87)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from connectors.cli.doctor import gateway
from connectors.cli.doctor.findings import OK, WARN
from connectors.cli.doctor.gateway import check_clocks
from schemas.settings.settings import GatewaySettings, Settings
from tests.connectors.agent_sdk.small_server import always, answer, serving
from tests.jobs.topic_load import append_all, registration

pytestmark = pytest.mark.requirement("ST-87")


@contextmanager
def gateway_that_says(offset_s: float) -> Iterator[int]:
    """Serve the metric of a gateway; its port."""
    body = f"# TYPE x gauge\ntrunkline_log_clock_offset_seconds {offset_s}\n".encode()
    with serving(always(answer(200, body))) as server:
        yield server.port


def at_port(settings: Settings, port: int) -> Settings:
    gateway = settings.gateway.model_copy(update={"port": port})
    return settings.model_copy(update={"gateway": gateway})


@pytest.mark.parametrize(("offset_s", "said"), [(600.0, "600 s behind that"), (-75.2, "75 s ahead of that")])
def test_a_gateway_with_another_clock_than_the_log_is_named(tmp_path, offset_s, said):
    with gateway_that_says(offset_s) as port:
        settings = at_port(Settings(data_dir=tmp_path, gateway=GatewaySettings()), port)
        finding = check_clocks(settings)
    assert (finding.level, said in finding.found) == (WARN, True)
    assert "NTP" in finding.mend
    assert check_clocks(settings).found == "not looked at: Kafka does not answer"


@pytest.mark.kafka
def test_a_record_of_the_future_is_named_with_its_time(backbone_settings, keyring, monkeypatch):
    append_all(backbone_settings, [registration("ab12cd34", keyring)])
    with gateway_that_says(0.0) as port:
        settings = at_port(backbone_settings, port)
        assert check_clocks(settings).level == OK
        now_s = time.time()
        monkeypatch.setattr(gateway.time, "time", lambda: now_s - 3600)
        finding = check_clocks(settings)
    assert finding.level == WARN
    assert (
        "which is in the future" in finding.found
        and time.strftime("%Y-%m-%dT", time.gmtime(now_s)) in finding.found
    )
