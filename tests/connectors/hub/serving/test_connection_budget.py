"""The books of a gateway's connections: which one gives way, how long each may take, and what is logged."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from typing import Any

import pytest

from connectors.hub.serving.connection_budget import BudgetLimits, ConnectionBudget, Phase, Place
from connectors.plumbing.machine.json_log import LogLimit, RepeatedLines
from connectors.programs.gateway_program.http_server import fitted, reserved
from schemas.settings.settings import PROJECT_ROOT
from tests.programs import run_program
from trunkline_agent.errors import TrunklineError

pytestmark = pytest.mark.requirement("SE-10")

LIMITS = BudgetLimits(anonymous=3, authenticated=4, head_s=10, body_s=30)


class Fake:
    """A connection that is at what the test says."""

    def __init__(self, phase: Phase = Phase.HEAD) -> None:
        self.at = phase
        self.request = 0
        self.is_cut = False

    def phase(self) -> tuple[Phase, Any]:
        return self.at, self.request

    def cut(self) -> None:
        self.is_cut = True


class Books:
    """A budget with a clock of its own."""

    def __init__(self, limits: BudgetLimits = LIMITS) -> None:
        self.now = 0.0
        self.budget = ConnectionBudget(limits, lambda: self.now)

    def stranger(self, phase: Phase = Phase.HEAD) -> tuple[Fake, Place | None]:
        fake = Fake(phase)
        return fake, self.budget.take(fake, "hub")

    def known(self, principal: str, phase: Phase = Phase.IDLE, *, is_operator: bool = False) -> Fake | None:
        """An authenticated connection, None when it is refused."""
        fake = Fake(phase)
        place = self.budget.take(fake, "hub")
        assert place is not None
        if self.budget.authenticate(place, principal, is_operator=is_operator):
            return fake
        self.budget.give_back(place)
        return None


def test_a_stranger_beyond_the_budget_closes_the_oldest_one_that_is_not_being_answered() -> None:
    books = Books()
    answered, first, second = (books.stranger(at)[0] for at in (Phase.ANSWERING, Phase.HEAD, Phase.BODY))
    assert books.stranger()[1] is not None
    assert [one.is_cut for one in (answered, first, second)] == [False, True, False]
    assert books.stranger()[1] is not None
    assert [one.is_cut for one in (answered, first, second)] == [False, True, True]
    assert books.budget.open == {("hub", False): 3}
    assert books.budget.cut == {("hub", "anonymous_budget"): 2}


def test_a_stranger_is_refused_only_while_all_others_are_being_answered() -> None:
    books = Books()
    taken = [books.stranger(Phase.ANSWERING) for _ in range(3)]
    assert books.stranger()[1] is None
    assert books.budget.cut == {("hub", "refused"): 1}
    books.budget.give_back(taken[0][1])
    books.budget.give_back(taken[0][1])
    assert books.stranger()[1] is not None


def test_strangers_never_close_an_authenticated_connection() -> None:
    books = Books()
    known = [books.known("ann"), books.known("bob")]
    for _ in range(20):
        books.stranger()
    assert not any(one.is_cut for one in known)
    assert books.budget.open == {("hub", True): 2, ("hub", False): 3}


def test_beyond_its_share_a_principal_loses_its_own_oldest_and_unfinished_requests_go_first() -> None:
    books = Books()
    idle, slow = books.known("ann"), books.known("ann", Phase.BODY)
    other = books.known("bob")
    assert books.known("ann") is not None
    assert [one.is_cut for one in (idle, slow, other)] == [False, True, False]
    assert books.known("ann") is not None
    assert [one.is_cut for one in (idle, other)] == [True, False]


def test_a_principal_whose_share_is_in_use_is_refused_and_others_are_not() -> None:
    books = Books()
    streams = [books.known("ann", Phase.ANSWERING), books.known("ann", Phase.ANSWERING)]
    assert books.known("ann") is None
    assert books.known("bob") is not None
    assert not any(one.is_cut for one in streams)


@pytest.mark.requirement("LM-23")
def test_two_principals_whose_connections_are_all_answered_leave_some_to_others() -> None:
    books = Books(BudgetLimits(anonymous=3, authenticated=64, head_s=10, body_s=30))
    for name in ("ann", "bob"):
        while books.known(name, Phase.ANSWERING) is not None:
            pass
    assert all(books.known(f"other{number}", Phase.ANSWERING) is not None for number in range(10))
    while books.known("eve", Phase.ANSWERING) is not None:
        pass
    assert books.known("eve", Phase.ANSWERING, is_operator=True) is not None


def test_beyond_the_whole_budget_the_principal_with_the_most_connections_gives_way() -> None:
    books = Books()
    greedy = [books.known("ann"), books.known("ann")]
    others = [books.known("bob"), books.known("eve")]
    assert books.known("joe") is not None
    assert [one.is_cut for one in (*greedy, *others)] == [True, False, False, False]
    assert books.budget.cut == {("hub", "authenticated_budget"): 1}


def test_a_connection_that_changes_its_principal_is_counted_once() -> None:
    books = Books()
    place = books.budget.take(Fake(), "hub")
    for principal in ("ann", "ann", "bob"):
        assert books.budget.authenticate(place, principal)
    assert books.budget.open == {("hub", False): 0, ("hub", True): 1}
    books.budget.give_back(place)
    assert not books.budget.open.total()


@pytest.mark.requirement("SE-11")
@pytest.mark.parametrize(
    ("phase", "limit_s"), [(Phase.HEAD, 10), (Phase.BODY, 32), (Phase.UNREAD, 70), (Phase.CLOSING, 10)]
)
def test_a_connection_is_cut_when_one_phase_of_one_request_takes_too_long(phase: Phase, limit_s: float) -> None:
    books = Books()
    fake, _ = books.stranger(phase)
    books.budget.sweep()
    books.now = limit_s - 1
    fake.request += 1  # another request: the time begins anew
    books.budget.sweep()
    books.now += limit_s - 0.5
    books.budget.sweep()
    assert not fake.is_cut
    books.now += 1
    books.budget.sweep()
    assert fake.is_cut
    assert books.budget.cut == {("hub", phase.value): 1}


@pytest.mark.requirement("SE-11")
def test_answers_and_streams_take_as_long_as_they_like() -> None:
    books = Books()
    fake = books.known("ann", Phase.ANSWERING)
    for books.now in (1, 1e6, 2e6):
        books.budget.sweep()
    assert not fake.is_cut


@pytest.mark.requirement("SE-12")
def test_budgets_are_scaled_down_to_the_descriptors_and_a_reserve_is_kept() -> None:
    limits = BudgetLimits(anonymous=256, authenticated=2000, head_s=10, body_s=30)
    assert fitted(limits, 4, 20_000) is limits
    small = fitted(limits, 4, 1024)
    assert small.anonymous + small.authenticated + reserved(4) == 1024
    assert small.anonymous > 50
    with pytest.raises(TrunklineError, match="may open 450 files, and 448 are reserved"):
        fitted(limits, 4, 450)


@pytest.mark.long
@pytest.mark.requirement("SE-12")
def test_the_soft_limit_of_descriptors_is_raised_as_far_as_the_budgets_need_it() -> None:
    said = """
import resource
from connectors.hub.serving.connection_budget import BudgetLimits
from connectors.programs.gateway_program.http_server import fit_to_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1500))
found = fit_to_descriptors(BudgetLimits(256, 2000, 10, 30), 4, 10)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], found.anonymous + found.authenticated)
"""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 1500
    done = subprocess.run(
        [sys.executable, "-c", said], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == f"1500 {1500 - 10 - reserved(4)}"
    assert "connection_budgets_reduced" in done.stdout


@pytest.mark.requirement("SE-13")
def test_a_line_of_one_kind_is_logged_every_few_seconds_with_the_number_left_out() -> None:
    now = 0.0
    limit: LogLimit[str] = LogLimit(5, lambda: now)
    found = []
    for step in range(12):
        now = float(step)
        found.append((limit.omitted("one"), limit.omitted("one")))
    assert found[0] == (0, None)
    assert [first for first, _ in found if first is not None] == [0, 9, 9]
    assert limit.omitted("another") == 0


@pytest.mark.requirement("SE-13")
def test_kinds_of_lines_are_remembered_in_bounded_memory() -> None:
    limit: LogLimit[int] = LogLimit(5, lambda: 0.0)
    for number in range(10_000):
        limit.omitted(number)
    assert len(limit._kinds) <= 256


@pytest.mark.requirement("SE-15")
def test_lines_of_more_kinds_than_are_told_apart_are_bounded_and_counted_together() -> None:
    now = 0.0
    limit: LogLimit[int] = LogLimit(5, lambda: now, most=4)
    # A further round finds the same places taken.
    logged = [number for number in (*range(10), *range(10)) if limit.omitted(number) is not None]
    assert logged == [0, 1, 2, 3]
    now = 5.0
    assert limit.due() == [(0, 1), (1, 1), (2, 1), (None, 13)]
    assert limit.due() == []
    now = 10.0
    assert limit.due() == []
    assert not limit._kinds


@pytest.mark.requirement("SE-15")
def test_the_number_left_out_is_due_when_the_time_is_over_and_only_once() -> None:
    now = 0.0
    limit: LogLimit[str] = LogLimit(5, lambda: now)
    assert [limit.omitted("one") for _ in range(3)] == [0, None, None]
    now = 4.9
    assert limit.due() == []
    now = 5.0
    assert limit.due() == [("one", 2)]
    # Its line was logged by now.
    assert limit.omitted("one") is None
    now = 10.0
    assert limit.omitted("one") == 1
    now = 15.0
    assert limit.due() == []


_FLOODED = """
import logging, socket
from connectors.plumbing.machine.json_log import configure_json_log
configure_json_log("tests", [])
for number in range(50):
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    try:
        raise OSError(24, "Too many open files")
    except OSError as error:
        logging.getLogger("asyncio").error(
            f"socket.accept() out of system resource\\nsocket: {number}", exc_info=error
        )
"""


@pytest.mark.requirement("SE-13")
def test_what_strangers_make_libraries_log_is_one_line_of_a_kind() -> None:
    done = run_program([sys.executable, "-c", _FLOODED], check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in lines] == ["uvicorn.error", "asyncio"]


@pytest.mark.requirement("SE-13")
def test_the_next_line_of_a_kind_has_the_number_of_those_left_out() -> None:
    times = iter((0.0, 1.0, 2.0, 6.0))
    lines = RepeatedLines(LogLimit(5, lambda: next(times)))
    records = [logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, "x", (), None) for _ in range(4)]
    assert [lines.filter(record) for record in records] == [True, False, False, True]
    assert records[3].omitted == 2
