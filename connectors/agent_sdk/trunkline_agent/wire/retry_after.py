"""The header `Retry-After` of an HTTP answer: seconds, or a moment in one of the three forms of RFC 9110."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Final

# More than RFC 9110 allows: a server that writes a float means it.
_SECONDS: Final = re.compile(r"[0-9]+(\.[0-9]+)?(e[0-9]+)?|inf")
_MONTHS: Final = "JanFebMarAprMayJunJulAugSepOctNovDec"
_CLOCK: Final = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
# IMF-fixdate, RFC 850 with two digits for the year, and asctime. Some servers write another zone than GMT.
_ZONE: Final = r" (?:GMT|UTC|Z|(?P<zone>[-+]\d{4}))"
_FORMS: Final = tuple(
    re.compile(form)
    for form in (
        rf"[A-Z][a-z]{{2}}, (?P<day>\d\d?) (?P<month>[A-Z][a-z]{{2}}) (?P<year>\d{{4}}) {_CLOCK}{_ZONE}",
        rf"[A-Z][a-z]{{5,8}}, (?P<day>\d\d)-(?P<month>[A-Z][a-z]{{2}})-(?P<year>\d\d) {_CLOCK}{_ZONE}",
        rf"[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) (?P<day>[ \d]\d) {_CLOCK} (?P<year>\d{{4}})",
    )
)
_YEARS_AHEAD: Final = 50


def retry_after_s(headers: Mapping[str, str], now_s: float | None = None) -> float:
    """Return the seconds that an answer asks to wait, 0 without such a header or with one that cannot be read.

    Args:
        headers: The headers of the answer, by names in lower case. A moment is compared with that of the header
            `date`, so the clocks of the two sides need not agree.
        now_s: The time of this machine in seconds since 1970, for an answer without that header. None: now.
    """
    given = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(given):
        return float(given)
    now_s = time.time() if now_s is None else now_s
    until_s = http_date_s(given, now_s)
    if until_s is None:
        return 0.0
    sent_s = http_date_s(headers.get("date", ""), now_s)
    return max(0.0, until_s - (now_s if sent_s is None else sent_s))


def http_date_s(text: str, now_s: float) -> float | None:
    """Return the moment of a date in a header (RFC 9110, 5.6.7) in seconds since 1970; None if it is none.

    It is in UTC in each of the three forms. `now_s` is the present, by which a year of two digits is read.
    """
    found = next((match for form in _FORMS if (match := form.fullmatch(text.strip()))), None)
    if found is None:
        return None
    # The import is not needed for the usual answer, which has seconds or no such header.
    from datetime import UTC, datetime

    fields = found.groupdict()
    month, rest = divmod(_MONTHS.find(fields["month"]), 3)
    year = int(fields["year"])
    if year < 100:
        present = time.gmtime(now_s).tm_year
        year += present - present % 100
        if year > present + _YEARS_AHEAD:
            year -= 100
    clock = (int(fields["hour"]), int(fields["minute"]), min(int(fields["second"]), 59))  # 60: a leap second
    try:
        moment = datetime(year, 0 if rest else month + 1, int(fields["day"]), *clock, tzinfo=UTC)
    except ValueError:
        return None
    zone = fields.get("zone") or "+0000"
    return moment.timestamp() - int(zone[0] + "1") * (int(zone[1:3]) * 3600 + int(zone[3:]) * 60)
