"""The times of a schedule's runs: by a cron expression in UTC, or by an interval (DL-23).

A run time is a whole second, in microseconds since 1970 UTC. All functions depend on their arguments alone, so
the fold gives the same times in every runner. UTC has no daylight saving time, so no run is left out or
doubled.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple

from cronsim import CronSim, CronSimError

CRON_CHARACTERS_MOST: Final = 200
EVERY_S_MOST: Final = 365 * 24 * 3600
_SECOND_US: Final = 1_000_000
# With a sixth field, cronsim reads the first one as seconds.
_FIELDS: Final = 5
# The names of crontab(5). @reboot is no time.
_NAMED: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_DAY: Final = timedelta(days=1)
# The rarest days are February 29 on one day of the week. They are at most 40 years apart, and cronsim looks 50
# years ahead. So an expression that has a time after this day has one after any other day, too.
_SOME_DAY: Final = datetime(2000, 1, 1, tzinfo=UTC)


def cron_fault(text: str) -> str | None:
    """Return what is wrong with a cron expression, or `None` if it has run times.

    An expression has at most 200 characters and five fields: minute, hour, day of month, month and day of week,
    apart by spaces or tabs, as in crontab(5) of Debian; or it is `@hourly`, `@daily`, `@midnight`, `@weekly`,
    `@monthly`, `@yearly` or `@annually`. The returned text does not quote it. The check takes 50 ms for an
    expression that never runs, and at most 2 ms for any other.
    """
    spaced = text.replace("\t", " ")
    if len(text) > CRON_CHARACTERS_MOST or not text.isascii() or not spaced.isprintable():
        return f"not a cron expression: not printable ASCII, or more than {CRON_CHARACTERS_MOST} characters"
    if text not in _NAMED and len(text.split()) != _FIELDS:
        return (
            "not a cron expression: expected minute, hour, day of month, month and day of week,"
            f" in UTC, or one of {', '.join(_NAMED)}"
        )
    return _fault(text)


@lru_cache(maxsize=1024)
def _fault(text: str) -> str | None:
    try:
        times = _simulated(text, _SOME_DAY)
    except CronSimError as error:
        # The message names a field and quotes nothing.
        return f"not a cron expression, or one that never runs: {error}"
    return "the cron expression never runs" if _next(times) is None else None


def _simulated(text: str, start: datetime, *, reverse: bool = False) -> CronSim:
    return CronSim(_NAMED.get(text, text), start, reverse)


def _next(times: CronSim) -> datetime | None:
    """Return the next time of an expression. `None`: it has none within 50 years, or up to the year 9999."""
    try:
        return next(times)
    except (StopIteration, OverflowError, ValueError):
        return None


class RunTimes(NamedTuple):
    """The run times of one schedule.

    Attributes:
        cron: the cron expression, which `cron_fault` has checked; `None` for an interval.
        every_s: the interval in seconds; `None` for a cron expression.
    """

    cron: str | None
    every_s: int | None

    def first(self, set_at: int) -> int | None:
        """Return the first run of a schedule that is set at `set_at`, or `None` if there is none up to 9999.

        The first interval begins at the next whole second.
        """
        if self.every_s is None:
            return self.after(set_at, set_at)
        begin = -(-set_at // _SECOND_US) * _SECOND_US
        return self.after(begin, begin)

    def after(self, run_at: int, moment: int) -> int | None:
        """Return the first run after `moment`, or `None` if there is none up to the year 9999.

        `run_at` is the time of a run, or the begin of the first interval. It is not after `moment`.
        """
        if self.every_s is not None:
            period = self.every_s * _SECOND_US
            found = run_at + ((moment - run_at) // period + 1) * period
            return None if _time_of(found) is None else found
        start = _time_of(moment)
        following = None if start is None else _next(_simulated(str(self.cron), start))
        return None if following is None else _moment_of(following)

    def latest(self, run_at: int, moment: int) -> int:
        """Return the last run up to `moment`. The run at `run_at` is not after `moment`."""
        if self.every_s is not None:
            period = self.every_s * _SECOND_US
            return run_at + (moment - run_at) // period * period
        # From a time with a fraction of a second, cronsim goes back to its whole second.
        start = _time_of(moment + 1)
        found = None if start is None else _next(_simulated(str(self.cron), start, reverse=True))
        return run_at if found is None else _moment_of(found)

    def count_from(self, run_at: int, moment: int) -> int:
        """Return the number of runs from the one at `run_at` on that are before `moment`.

        For a cron expression, a century between the two takes about 50 ms.
        """
        if self.every_s is not None:
            return max(0, -((run_at - moment) // (self.every_s * _SECOND_US)))
        start, end = _time_of(run_at), _time_of(moment)
        if start is None or end is None or end <= start:
            return 0
        times = _simulated(str(self.cron), start)
        runs_a_day, day = len(times.hours) * len(times.minutes), start.date()
        found = _runs_on_day_before(times, end) - _runs_on_day_before(times, start)
        while day < end.date():
            found += runs_a_day if _is_day_of(times, day) else 0
            day += _DAY
        return found


def _is_day_of(times: CronSim, day: date) -> bool:
    return day.month in times.months and times.match_day(day)


def _runs_on_day_before(times: CronSim, end: datetime) -> int:
    """Return the number of runs on the day of `end` that are before `end`."""
    if not _is_day_of(times, end.date()):
        return 0
    in_full_hours = sum(hour < end.hour for hour in times.hours) * len(times.minutes)
    if end.hour not in times.hours:
        return in_full_hours
    is_within_minute = end.second > 0 or end.microsecond > 0
    return in_full_hours + sum(minute < end.minute + is_within_minute for minute in times.minutes)


def _time_of(moment: int) -> datetime | None:
    """Return a time in microseconds since 1970 UTC as a datetime, or `None` if its year is not 1 to 9999."""
    try:
        return _EPOCH + moment * _MICROSECOND
    except OverflowError:
        return None


def _moment_of(found: datetime) -> int:
    return (found - _EPOCH) // _MICROSECOND
