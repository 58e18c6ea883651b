"""Requests over a limit: 429 with the time to wait, a record of the refusal, and no effect."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from connectors.operations.principals.limit_operations import LimitsRequest
from tests.matrix.asking import WAYS, Watched, operation
from tests.matrix.ground import Ground
from tests.matrix.samples import SAMPLES

pytestmark = [pytest.mark.requirement(one) for one in ("LM-01", "LM-02")]


class Case(NamedTuple):
    """An operation that a limit refuses.

    Attributes:
        name: The operation.
        limit: The name of the limit in a request that sets it.
        reason: The reason of the refusal.
        most: The limit, which as many requests just reach.
        is_of_recipient: Whether it is that of the recipient's mailbox.
    """

    name: str
    limit: str
    reason: str
    most: int = 2
    is_of_recipient: bool = False


BODY_BYTES = len('{"in":"the-payload"}')
CASES = (
    Case("send_message", "messages_per_minute", "rate_limited"),
    Case("send_message", "bytes_per_minute", "rate_limited", 2 * BODY_BYTES),
    Case("send_message", "pending_most", "mailbox_full", is_of_recipient=True),
    Case("send_message", "bytes_most", "mailbox_full", 2 * BODY_BYTES, is_of_recipient=True),
    Case("publish_message", "messages_per_minute", "rate_limited"),
    Case("publish_message", "bytes_per_minute", "rate_limited", 2 * BODY_BYTES),
    Case("register_job", "live_jobs_most", "limit_reached"),
    Case("subscribe_mailbox", "subscriptions_most", "limit_reached"),
)


def test_each_limit_has_a_case() -> None:
    assert {case.limit for case in CASES} == set(LimitsRequest.model_fields)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.limit}")
@pytest.mark.parametrize("careful", WAYS)
def test_a_request_over_the_limit_is_refused_with_the_time_to_wait(
    ground: Ground, case: Case, careful: bool
) -> None:
    caller, recipient = ground.principal("d"), ground.principal("w")
    limited = recipient if case.is_of_recipient else caller
    changed: dict[str, Any] = {"recipient": recipient.name} if case.name == "send_message" else {}
    requests = [SAMPLES[case.name].request(ground, caller, **changed) for _ in range(3)]
    ground.do("POST", f"/limits/name/{limited.name}", {case.limit: case.most})
    watched = Watched(ground)
    for request in requests[:2]:
        answer = ground.ask(caller, case.name, request, careful=careful)
        assert answer.status == SAMPLES[case.name].status, answer
    done = len(watched.records)
    answer = ground.ask(caller, case.name, requests[2], careful=careful)
    assert answer.said == (429, case.reason)
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.verdict is None
    assert len(watched.records) == done
    if case.limit != "bytes_most":  # the log refuses it
        assert watched.refused == [(case.reason, caller.name, operation(ground, case.name).route)]
    # A limit of one's own is none of others.
    other = ground.principal("d")
    if not case.is_of_recipient:
        request = SAMPLES[case.name].request(ground, other, **changed)
        assert ground.ask(other, case.name, request).status == SAMPLES[case.name].status


@pytest.mark.parametrize("careful", WAYS)
def test_a_repeated_request_does_not_count_twice(ground: Ground, careful: bool) -> None:
    caller = ground.principal("d")
    ground.do("POST", f"/limits/name/{caller.name}", {"live_jobs_most": 1, "messages_per_minute": 1})
    for name in ("register_job", "send_message"):
        request = SAMPLES[name].request(ground, caller)
        for _ in range(3):
            answer = ground.ask(caller, name, request, careful=careful, **{"Idempotency-Key": "once"})
            assert answer.status == SAMPLES[name].status, (name, answer)
