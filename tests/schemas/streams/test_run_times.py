"""The times of runs (DL-23) against a plain model that looks at every day."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.streams.schedule.run_times import CRON_CHARACTERS_MOST, EVERY_S_MOST, RunTimes, cron_fault
from tests.schemas.job_records import START_US

pytestmark = pytest.mark.requirement("DL-23")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
S_US, DAY_US = 1_000_000, 86_400_000_000
WINDOW_DAYS = 40
RUNS_MOST = 60


class Field(NamedTuple):
    """One field of an expression: its text, and the numbers that it means."""

    text: str
    numbers: frozenset[int]


class Expression(NamedTuple):
    """The five fields of a cron expression."""

    minute: Field
    hour: Field
    day: Field
    month: Field
    weekday: Field

    @property
    def text(self) -> str:
        return " ".join(field.text for field in self)

    def is_day(self, day: date) -> bool:
        """If one of the two fields of the day begins with a star, both must fit; else one is enough."""
        fits = (day.day in self.day.numbers, day.isoweekday() % 7 in {n % 7 for n in self.weekday.numbers})
        both = self.day.text[0] == "*" or self.weekday.text[0] == "*"
        return day.month in self.month.numbers and (all(fits) if both else any(fits))

    def runs(self, begin: datetime, end: datetime) -> list[int]:
        """All runs from `begin` on that are before `end`."""
        found, day = [], begin.date()
        while day <= end.date():
            if self.is_day(day):
                every = (
                    datetime(day.year, day.month, day.day, hour, minute, tzinfo=UTC)
                    for hour in sorted(self.hour.numbers)
                    for minute in sorted(self.minute.numbers)
                )
                found += [moment_of(at) for at in every if begin <= at < end]
            day += timedelta(days=1)
        return found


def moment_of(at: datetime) -> int:
    return (at - EPOCH) // timedelta(microseconds=1)


@st.composite
def fields(draw: st.DrawFn, low: int, high: int) -> Field:
    """A star, a number, a range, a step, or a list of these."""
    parts = draw(
        st.lists(st.sampled_from(("star", "number", "range", "step", "steps")), min_size=1, max_size=2)
    )
    texts, numbers = [], set[int]()
    for part in parts:
        first = draw(st.integers(low, high))
        last = draw(st.integers(first, high))
        step = draw(st.integers(1, 12))
        text, meant = {
            "star": ("*", range(low, high + 1)),
            "number": (str(first), range(first, first + 1)),
            "range": (f"{first}-{last}", range(first, last + 1)),
            "step": (f"*/{step}", range(low, high + 1, step)),
            "steps": (f"{first}-{last}/{step}", range(first, last + 1, step)),
        }[part]
        # To cronsim a range of one number has no end when it has a step: 5-5/2 is 5/2.
        texts.append(f"{first}-{last}" if part == "steps" and first == last else text)
        numbers |= set(meant)
    return Field(",".join(texts), frozenset(numbers))


EXPRESSIONS = st.builds(
    Expression, fields(0, 59), fields(0, 23), fields(1, 31), fields(1, 12), fields(0, 7)
).filter(lambda one: cron_fault(one.text) is None)
# Often at a whole minute, and around the ends of months and years.
MOMENTS = st.builds(
    lambda day, minute, more_us: (day * 1440 + minute) * 60 * S_US + more_us,
    st.integers(20_000, 24_000),
    st.integers(0, 1439),
    st.sampled_from((0, 0, 1, 999_999, S_US, 59_999_999)) | st.integers(0, 59_999_999),
)


@pytest.mark.long
@given(EXPRESSIONS, MOMENTS)
@settings(max_examples=100, deadline=None)
def test_the_runs_of_a_cron_expression_are_those_of_the_model_with_none_left_out_or_doubled(
    wanted: Expression, now_us: int
) -> None:
    times, now = RunTimes(wanted.text, None), EPOCH + timedelta(microseconds=now_us)
    expected = wanted.runs(now + timedelta(microseconds=1), now + timedelta(days=WINDOW_DAYS))
    end_us, found, run = now_us + WINDOW_DAYS * DAY_US, [], times.first(now_us)
    while run is not None and run < end_us and len(found) < RUNS_MOST:
        found.append(run)
        run = times.after(run, run)
    assert found == expected[:RUNS_MOST]


@given(EXPRESSIONS, MOMENTS, st.integers(0, WINDOW_DAYS * DAY_US))
@settings(max_examples=100, deadline=None)
def test_counts_and_latest_runs_of_a_cron_expression_are_those_of_the_model(
    wanted: Expression, now_us: int, span_us: int
) -> None:
    times = RunTimes(wanted.text, None)
    first = times.first(now_us)
    assert first is not None
    moment, begin = first + span_us, EPOCH + timedelta(microseconds=first)
    expected = wanted.runs(begin, EPOCH + timedelta(microseconds=moment + 1))
    assert times.latest(first, moment) == expected[-1]
    assert times.count_from(first, moment) == len([run for run in expected if run < moment])
    following = times.after(first, moment)
    assert following is None or times.count_from(first, following) == len(expected)


@given(st.integers(1, EVERY_S_MOST), MOMENTS, st.integers(0, 400), st.integers(-1, 1))
@settings(max_examples=200, deadline=None)
def test_the_runs_of_an_interval_are_whole_seconds_at_equal_distances(
    every_s: int, now_us: int, periods: int, more_us: int
) -> None:
    times, period = RunTimes(None, every_s), every_s * S_US
    first = times.first(now_us)
    assert first is not None
    assert first % S_US == 0
    assert period <= first - now_us < period + S_US
    moment = max(first, first + periods * period + more_us)
    expected = [first + n * period for n in range(periods + 2)]
    assert times.latest(first, moment) == max(run for run in expected if run <= moment)
    assert times.after(first, moment) == min(run for run in expected if run > moment)
    assert times.count_from(first, moment) == len([run for run in expected if run < moment])


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("0 9 * * 1-5", "2027-01-15T09:00", "2027-01-18T09:00"),  # a Friday, then Monday
        ("0 0 1 * *", "2027-02-01T00:00", "2027-03-01T00:00"),
        ("0 0 L * *", "2027-01-31T00:00", "2027-02-28T00:00"),
        ("0 0 29 2 *", "2028-02-29T00:00", "2032-02-29T00:00"),
        ("30 2 28 3 *", "2027-03-28T02:30", "2028-03-28T02:30"),  # no such hour in Berlin
        ("*/20 * * * *", "2027-01-15T08:20", "2027-01-15T08:40"),
        ("0 0 * jan mon#1", "2028-01-03T00:00", "2029-01-01T00:00"),
        ("0 0 13 * fri", "2027-01-22T00:00", "2027-01-29T00:00"),  # either of the two
    ],
)
def test_an_expression_means_what_debians_crontab_page_says_in_utc(text: str, first: str, second: str) -> None:
    times = RunTimes(text, None)
    found = times.first(START_US)
    assert found == moment_of(datetime.fromisoformat(f"{first}:00Z"))
    assert times.after(found, found) == moment_of(datetime.fromisoformat(f"{second}:00Z"))


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
        ("@monthly", "0 0 1 * *"),
        ("@weekly", "0 0 * * 0"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@hourly", "0 * * * *"),
        ("0\t9 *  *\t1-5", "0 9 * * 1-5"),
    ],
)
@pytest.mark.requirement("DL-23")
def test_a_named_expression_and_fields_apart_by_tabs_mean_the_same_as_five_fields(
    name: str, expression: str
) -> None:
    assert cron_fault(name) is None
    named, usual = RunTimes(name, None), RunTimes(expression, None)
    found = named.first(START_US)
    assert found == usual.first(START_US) is not None
    assert named.after(found, found) == usual.after(found, found)
    later = found + 400 * 24 * 3600 * S_US
    assert named.latest(found, later) == usual.latest(found, later)
    assert named.count_from(found, later) == usual.count_from(found, later)


NEVER = ("0 0 31 2 *", "0 0 30 2 */2", "0 0 31 4,6,9,11 *", "0 0 */31 * 1#5", "0 0 */16 2 0#5,1#5,2#5")


@pytest.mark.parametrize("text", NEVER)
def test_an_expression_that_never_runs_is_found_in_a_bounded_time(text: str) -> None:
    begin = time.process_time()
    fault = cron_fault(text)
    assert fault is not None
    assert "never runs" in fault
    assert time.process_time() - begin < 2
    # An expression that was accepted nevertheless would have no run.
    if "#" in text:
        assert RunTimes(text, None).first(START_US) is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "* * * *",
            "* * * * * *",
            "@reboot",
            "@Daily",
            "@daily ",
            "@daily *",
            "CRON_TZ=Asia/Tokyo 0 0 * * *",
            "a b c d e",
            "61 * * * *",
            "* 24 * * *",
            "* * 0 * *",
            "* * * 13 *",
        ),
        *("* * * * 8", "*/0 * * * *", "5-1 * * * *", "-1 * * * *", "1.5 * * * *", "* * * * mon#6", "* * * * L"),
        *("*\n* * * *", "*\v* * * *", "\u0661 * * * *", "0," * CRON_CHARACTERS_MOST + "0 * * * *"),
    ],
)
def test_what_is_no_expression_with_five_fields_is_refused_without_being_quoted(text: str) -> None:
    fault = cron_fault(text)
    assert fault is not None
    assert fault.startswith("not a cron expression")
    assert len(text) < 3 or text not in fault


@given(st.text("0123456789*/-,#LWmonjan ? ", max_size=30) | st.text(max_size=30))
@settings(max_examples=500, deadline=None)
def test_any_text_is_an_expression_or_refused_and_nothing_else_is_raised(text: str) -> None:
    if cron_fault(text) is None:
        assert RunTimes(text, None).first(START_US) is not None


@given(EXPRESSIONS, st.sampled_from((0, START_US, 4_000_000_000_000_000, 20_000_000_000_000_000)))
@settings(max_examples=100, deadline=None)
def test_an_accepted_expression_has_a_run_after_any_time(wanted: Expression, now_us: int) -> None:
    found = RunTimes(wanted.text, None).first(now_us)
    assert found is not None
    assert found > now_us


def test_there_is_no_run_after_the_year_9999() -> None:
    end_us = moment_of(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
    for times in (RunTimes("* * * * *", None), RunTimes(None, 60)):
        assert times.first(end_us) is None
        assert times.first(10**19) is None
        before = end_us - 119 * S_US
        assert times.after(before, before) is not None


def test_the_runs_of_a_century_are_counted_in_a_bounded_time() -> None:
    times, begin = RunTimes("* * * * *", None), time.process_time()
    first = times.first(START_US)
    assert first is not None
    assert times.count_from(first, first + 36_525 * DAY_US) == 36_525 * 1440
    assert time.process_time() - begin < 5
