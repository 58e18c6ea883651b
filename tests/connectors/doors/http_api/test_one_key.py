"""One idempotency key, used at once for several recipients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.connectors.doors.http_api.hub_stack import MESSAGES, HubStack


@pytest.mark.requirement("HH-26")
def test_one_key_at_once_for_two_recipients_sends_one_message(hub: HubStack) -> None:
    names, tokens = zip(*(hub.principal("worker") for _ in range(2)), strict=True)
    for number in range(5):
        key = {"Idempotency-Key": f"round-{number}"}

        def send(turn: int, key: dict[str, str] = key) -> int:
            body = {"recipient": names[turn % 2], "type": "x"}
            return int(hub.operator.post(MESSAGES, json=body, headers=key).status_code)

        with ThreadPoolExecutor(20) as senders:
            found = list(senders.map(send, range(20)))
        assert set(found) == {200, 409}
        assert found[::2].count(200) in (0, 10) and found[1::2].count(200) in (0, 10)
    got = [hub.client(token).get(MESSAGES, params={"limit": 100}).json()["messages"] for token in tokens]
    assert sum(map(len, got)) == 5
