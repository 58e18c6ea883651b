"""The check of `trunkline doctor` on the ends of certificates."""

from __future__ import annotations

from typing import Final

from connectors.cli.doctor.findings import Checks, Finding, fail, ok, warn
from connectors.plumbing.tls_keys.served_certificates import WARN_DAYS, certificate_ends, days_left
from schemas.settings.settings import Settings

CHECKS: Final = Checks()
_MEND: Final = "renew it: for the stack's own, ./trunkline tls create --renew (docs/how-to/rotate_keys.md)"


@CHECKS.add("certificates")
def check_certificates(settings: Settings) -> Finding:
    """Check that no certificate in use ends within 21 days. One that has ended is a failure."""
    ends = sorted(certificate_ends(settings).items(), key=lambda one: one[1])
    if not ends:
        return ok("none in use")
    path, first = ends[0]
    left = days_left(first)
    if left < 0:
        return fail(f"{path.name} ended on {first:%Y-%m-%d}", _MEND)
    if left < WARN_DAYS:
        return warn(f"{path.name} ends on {first:%Y-%m-%d}, in {left:.0f} days", _MEND)
    return ok(f"{len(ends)} certificates; the first to end is {path.name}, on {first:%Y-%m-%d}")
