"""Pauses after failures, one for each key, and the times at which held recipients are tried again (LM-08)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

import structlog

from connectors.doors.file_bridge.held_lines import Carried
from connectors.plumbing.network.rates import Backoff, TokenBuckets

log = structlog.stdlib.get_logger(__name__)

# The pauses before a session or a reader that failed is tried again: the first, and the longest.
_PUT_OFF_S: Final = (0.5, 5.0)
# A lock that another program has, or a file that it replaces, makes an attempt fail or two.
_STUCK: Final = 3
# The pauses before a mailbox that took no more is tried again, with one line at first.
_HELD_FIRST_S: Final = 0.5
_HELD_MOST_S: Final = 60.0
_LINES_MOST: Final = 1000
# So many lines about held recipients are logged in a minute.
_LOGGED_A_MINUTE: Final = 20
# The reason of a recipient that the files name as held, and that this bridge has not tried yet.
NOT_TRIED: Final = "not_tried"

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Failing:
    pauses: Backoff = field(default_factory=lambda: Backoff(*_PUT_OFF_S))
    until: float = -math.inf
    failures: int = 0
    why: str | None = None


class PutOff(Generic[Key]):
    """A registry of pauses after failures, one for each key, so that one failing key does not delay the others.

    A key names the thing that failed, such as a session. `report` is called with the key and the error's text
    after a failure, but not again while the text stays the same. Nothing here blocks: the caller asks `waits`.
    """

    def __init__(self, report: Callable[[Key, str], object]) -> None:
        self._report = report
        self._failing: dict[Key, _Failing] = {}

    def waits(self, key: Key) -> bool:
        """Return whether the pause of `key` after its last failure is not over yet."""
        return key in self._failing and time.monotonic() < self._failing[key].until

    def failed(self, key: Key, error: Exception) -> None:
        """Begin a pause for `key` after a failure, and report the error if its text is new for this key.

        Failures in a row make the pause longer, up to five seconds.
        """
        found = self._failing.setdefault(key, _Failing())
        found.until = time.monotonic() + found.pauses.next_s()
        found.failures += 1
        why = str(error)
        if found.why != why:
            found.why = why
            self._report(key, why)

    def went_well(self, key: Key) -> None:
        """End the pause of `key` after a success. Its next failure is reported again."""
        self._failing.pop(key, None)

    def stuck(self) -> dict[Key, str]:
        """Return the keys that failed at least three times in a row, with the last error."""
        return {key: str(one.why) for key, one in self._failing.items() if one.failures >= _STUCK}

    def keep(self, keys: Collection[Key]) -> None:
        """Remove the pauses of all keys that are not in `keys`, the keys of all things that still exist."""
        for key in self._failing.keys() - set(keys):
            del self._failing[key]


class HeldKey(NamedTuple):
    """A recipient that is held in a session of the queue."""

    session: str
    recipient: str


@dataclass
class _Held:
    why: str
    until: float
    pause_s: float = _HELD_FIRST_S
    lines: int = 1


class HeldRetries:
    """When held recipients are tried again, and with how many lines.

    The first attempt is made with one line. Each attempt that posts all its lines doubles them, and each that
    posts none doubles the pause, from half a second to a minute. So a mailbox that stays full costs one record
    a minute, and one that was emptied gets its lines quickly.

    Args:
        clock: Returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[HeldKey, _Held] = {}
        self._logged: TokenBuckets[str] = TokenBuckets(_LOGGED_A_MINUTE, _LOGGED_A_MINUTE / 60, clock)
        self._unlogged = 0

    def keep(self, session: str, recipients: Collection[str]) -> None:
        """Note which recipients are held in a session, by its files; those of others are forgotten."""
        for key in [key for key in self._held if key.session == session and key.recipient not in recipients]:
            self._free(key)
        for recipient in recipients:
            key = HeldKey(session, recipient)
            if key not in self._held:
                self._held[key] = _Held(NOT_TRIED, self._clock())
                self._log("recipient_held", key, NOT_TRIED)

    def forget(self, session: str) -> None:
        """Forget a session that was deleted."""
        self._held = {key: one for key, one in self._held.items() if key.session != session}

    def has(self, session: str, recipient: str) -> bool:
        """Return whether a recipient is held."""
        return HeldKey(session, recipient) in self._held

    def due(self, session: str) -> Iterator[tuple[str, int]]:
        """Yield the held recipients that are to be tried now, with the largest number of lines."""
        for key, one in list(self._held.items()):
            if key.session == session and one.until <= self._clock():
                yield key.recipient, one.lines

    def begin(self, session: str, refused: dict[str, str]) -> None:
        """Note recipients that were not held, and took no more now, with the reasons."""
        for recipient, why in refused.items():
            key = HeldKey(session, recipient)
            if key not in self._held:
                self._log("recipient_held", key, why)
            self._held[key] = _Held(why, self._clock() + _HELD_FIRST_S)

    def tried(self, session: str, recipient: str, carried: Carried) -> None:
        """Note the result of an attempt with a held recipient."""
        key = HeldKey(session, recipient)
        one = self._held.get(key)
        if one is None:
            return
        why = carried.held.get(recipient)
        if why is not None:
            one.pause_s = _HELD_FIRST_S if carried.lines else min(2 * one.pause_s, _HELD_MOST_S)
            one.why, one.lines, one.until = why, 1, self._clock() + one.pause_s
        elif carried.more:
            one.lines = min(2 * one.lines, _LINES_MOST)
        else:
            self._free(key)

    def reasons(self) -> dict[str, dict[str, str]]:
        """Return by session why its held recipients are held, by their names."""
        found: dict[str, dict[str, str]] = {}
        for key, one in self._held.items():
            found.setdefault(key.session, {})[key.recipient] = one.why
        return found

    def _free(self, key: HeldKey) -> None:
        del self._held[key]
        self._log("recipient_free", key, None)

    def _log(self, event: str, key: HeldKey, why: str | None) -> None:
        if self._logged.take(event):
            self._unlogged += 1
            return
        level = log.info if why is None else log.warning
        level(event, session=key.session, recipient=key.recipient, why=why, unlogged=self._unlogged)
        self._unlogged = 0
