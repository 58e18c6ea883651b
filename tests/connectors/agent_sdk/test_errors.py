"""The errors of the library: reasons, advice, exit codes and pickles."""

from __future__ import annotations

import pickle

import pytest

from trunkline_agent import errors
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub.answer_errors import error_of

KINDS = sorted(
    (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, TrunklineError)),
    key=lambda kind: kind.__name__,
)


class Odd(errors.Refused):
    """An error whose constructor takes no message."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"number {number} was refused: {text}", reason="odd")
        self.number = number


@pytest.mark.requirement("AG-02")
@pytest.mark.parametrize("kind", [*KINDS, lambda text, **more: Odd(7, text)])
def test_an_error_is_pickled_with_its_attributes(kind):
    error = kind("it failed")
    error.advice = "do this"
    error.extra = {"a": 1}
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  its own
    assert type(again) is type(error) and str(again) == str(error) and str(again).endswith("it failed; do this")
    assert vars(again) == vars(error) and again.args == error.args and again.reason == error.reason


@pytest.mark.requirement("AG-02")
def test_each_kind_has_a_reason_and_an_exit_code_of_its_branch():
    codes = {errors.UsageError: 2, errors.NotFound: 3, errors.Refused: 4, errors.BackboneUnreachable: 5}
    for kind in KINDS:
        branch = next((one for one in codes if issubclass(kind, one)), None)
        assert kind("x").exit_code == (1 if branch is None else codes[branch])
        assert kind("x").reason and str(kind("x", advice="")) == "x"
    assert len({kind.reason for kind in KINDS}) == len(KINDS)


@pytest.mark.requirement("AG-04")
@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "malformed", errors.UsageError),
        (413, "too_large", errors.UsageError),
        (415, "unsupported_media_type", errors.UsageError),
        (422, None, errors.UsageError),
        (401, "unauthorized", errors.Refused),
        (403, "policy", errors.Refused),
        (409, "seq_conflict", errors.Refused),
        (429, "rate_limited", errors.RateLimited),
        (404, "unknown_recipient", errors.NotFound),
        (410, "blob_gone", errors.NotFound),
        (408, "request_timeout", errors.BackboneUnreachable),
        (502, "launch_failed", errors.Refused),
        (502, None, errors.BackboneUnreachable),
        (503, "unreachable", errors.BackboneUnreachable),
        (504, None, errors.BackboneUnreachable),
        (500, "internal", TrunklineError),
        (302, None, TrunklineError),
    ],
)
def test_an_answer_becomes_the_error_of_its_status(status, reason, kind):
    body = b"<html>" if reason is None else b'{"reason": "%s", "message": "no\\u001b[31m\\n"}' % reason.encode()
    error = error_of(status, {"retry-after": "nonsense"}, body)
    assert type(error) is kind
    if reason is None:
        assert str(status) in str(error) and error.reason == kind.reason
    else:
        assert error.reason == reason and "no\ufffd[31m\ufffd" in str(error)
