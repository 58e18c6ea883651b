"""Pauses between attempts, and reasons that are logged once a minute."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from connectors.plumbing.network import rates as backoff_module
from connectors.plumbing.network.rates import Backoff, retry


def test_pauses_double_up_to_the_longest_and_start_again_after_a_reset() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_a_reason_is_logged_when_it_is_new_and_again_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(backoff_module.time, "monotonic", clock)
    backoff = Backoff()
    assert [backoff.is_to_log(reason) for reason in ("a", "a", "b", "a")] == [True, False, True, True]
    clock.return_value = 61.0
    assert [backoff.is_to_log("a"), backoff.is_to_log("a")] == [True, False]


def test_retry_returns_the_first_result_and_raises_what_the_last_attempt_raises() -> None:
    action = Mock(side_effect=[OSError, "found"])
    assert retry(action, on=(OSError,), times=3, pause_s=0) == "found"
    action = Mock(side_effect=OSError)
    with pytest.raises(OSError):
        retry(action, on=(OSError,), times=3, pause_s=0)
    assert action.call_count == 3
    action = Mock(side_effect=KeyError)
    with pytest.raises(KeyError):
        retry(action, on=(OSError,), times=3, pause_s=0)
    assert action.call_count == 1
