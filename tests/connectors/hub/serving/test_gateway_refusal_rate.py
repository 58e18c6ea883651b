"""Few refusals are recorded, and the number of the others is not lost."""

from __future__ import annotations

import json

from connectors.hub.serving.answers import RefusalRecorder
from connectors.plumbing.network.rates import BURST


def test_refusals_over_the_rate_are_counted_in_the_next_one_that_is_recorded():
    now, records = [100.0], []
    recorder = RefusalRecorder(records.append, lambda: now[0])
    for _ in range(50):
        recorder.record("unauthorized", "no bearer token", None, "GET /x")
    assert len(records) == BURST
    now[0] += 10
    recorder.record("unauthorized", "no bearer token", None, "GET /x")
    bodies = [json.loads(record.value) for record in records]
    assert [body["suppressed"] for body in bodies] == [0, 0, 0, 0, 0, 45]
    assert {body["principal"] for body in bodies} == {"anonymous"}
    assert len({record.ce_id for record in records}) == 6


def test_principals_and_routes_have_rates_of_their_own():
    records = []
    recorder = RefusalRecorder(records.append, lambda: 0.0)
    for principal in ("ann", "bo"):
        for route in ("GET /x", "GET /y"):
            for _ in range(20):
                recorder.record("policy", "no", principal, route)
    assert len(records) == 4 * BURST
