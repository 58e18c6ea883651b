"""The check of `trunkline doctor` on clocks: those of the brokers, of the gateway and of this machine."""

from __future__ import annotations

import time
import urllib.request
from datetime import UTC, datetime
from typing import Final

from connectors.cli.doctor.findings import Checks, Finding, ok, warn
from connectors.plumbing.gateway_client.gateway_tls import trust
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import KafkaSettings, Settings
from trunkline_agent.errors import BackboneUnreachable

CHECKS: Final = Checks()
_APART_S: Final = 5
_TIMEOUT_S: Final = 5.0
_GAUGE: Final = "trunkline_log_clock_offset_seconds "
_MEND: Final = "let chrony or another NTP client set the clocks of the brokers and of the gateways"


@CHECKS.add("clocks")
def check_clocks(settings: Settings) -> Finding:
    """Check that no record of the log is of the future, and that the gateway's clock is that of the log.

    More than five seconds are a warning. A Kafka or a gateway that does not answer is left to its own check.
    """
    offset_s = gateway_offset_s(settings)
    if offset_s is not None and abs(offset_s) > _APART_S:
        ahead = "behind" if offset_s > 0 else "ahead of"
        return warn(f"the gateway's clock is {abs(offset_s):.0f} s {ahead} that of the log", _MEND)
    try:
        future = future_records(settings.kafka, time.time() + _APART_S)
    except BackboneUnreachable:
        return ok("not looked at: Kafka does not answer")
    if future:
        partition, logged_s = max(future.items(), key=lambda one: one[1])
        when = datetime.fromtimestamp(logged_s, UTC).isoformat(timespec="seconds")
        return warn(
            f"a record of partition {partition} was logged at {when}, which is in the future: the clock of its "
            "broker is wrong, or was when it came",
            _MEND,
        )
    return ok(f"no record of the log and no gateway is more than {_APART_S} s away from this machine's clock")


def gateway_offset_s(settings: Settings) -> float | None:
    """Return the log's time minus the gateway's, as its metrics have it. None: the gateway does not answer."""
    url = f"{settings.gateway_url}/metrics"
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=trust(url, settings.gateway.ca_certs)),
    )
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    return next((float(line.removeprefix(_GAUGE)) for line in lines if line.startswith(_GAUGE)), None)


def future_records(kafka: KafkaSettings, after_s: float) -> dict[int, float]:
    """Return the time of the first record that was logged at `after_s` or later, by partition.

    Times are in seconds since 1970 UTC. Raises BackboneUnreachable if Kafka does not answer.
    """
    with topic_reader(kafka) as consumer:
        wanted = dict.fromkeys(consumer.assignment(), round(after_s * 1000))
        found = consumer.offsets_for_times(wanted)
        return {at.partition: one.timestamp / 1000 for at, one in found.items() if one is not None}
