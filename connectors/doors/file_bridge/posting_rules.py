"""The limits of mailboxes and senders for the lines that the bridge posts (LM-08), as the gateway knows them.

**Reads** `GET /api/hub/limits` and `/listeners`, and `GET /api/hub/principals` for limits of roles. **Owns**
the rates of this bridge: it counts what each sender sends through the files, as each gateway does for itself.

The fold refuses a posting that exceeds the limits in it, and then the line must stay in its file. So a posting
has limits only while the gateway's verdicts arrive. Otherwise the lines of recipients whose mailboxes have
limits of their own stay in the file, because those count without a gateway, too.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.plumbing.gateway_client.verdict_stream import VerdictStream
from connectors.plumbing.network.rates import TokenBuckets
from schemas.effects.recipients import Limits, limits_of
from schemas.streams.control.limits import NAME, ROLE, LimitRow
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.principal.principals import PrincipalRow
from schemas.wire.partitions import Position
from trunkline_agent.wire.verdicts import MAILBOX_FULL, RATE_LIMITED

# The reason why a line waits although its mailbox may have room.
NO_VERDICT: Final = "no_verdict"
# The reason why a line with a long body waits: its blob cannot be stored.
NO_GATEWAY: Final = "no_gateway"
# A posting waits so long for its verdict.
VERDICT_WAIT_S: Final = 10.0


class KnownLimits:
    """The limits that the gateway has answered, for principals and other names.

    Args:
        rows: The rows of `registry_limits` as JSON.
        roles: The roles of principals by name. Any other name counts as an agent's.
        listeners: The names of the listeners of the XML pump.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        roles: Mapping[str, str],
        listeners: Collection[str] = (),
    ) -> None:
        self.listeners = frozenset(listeners)
        self._rows = {f"{row['scope']}/{row['name']}": SimpleNamespace(**row) for row in rows}
        self._roles = roles
        self.own_mailboxes = frozenset(
            str(row["name"])
            for row in rows
            if row["scope"] == NAME and not (row["pending_most"] is None and row["bytes_most"] is None)
        )

    def of(self, name: str) -> Limits:
        """Return the limits of a principal, an agent or a listener."""
        return limits_of(self._get, name)

    def _get(self, row_type: type[Any], key: str) -> Any:
        if row_type is LimitRow:
            return self._rows.get(key)
        role = self._roles.get(key)
        if row_type is PrincipalRow:
            return None if role is None else SimpleNamespace(role=role)
        return key


def ask_limits(gateway: GatewayClient) -> KnownLimits:
    """Ask the gateway for all limits and listeners. Raises TrunklineError if it does not answer, or refuses."""
    rows = gateway.get(path_of("limits"))["limits"]
    roles: dict[str, str] = {}
    if any(row["scope"] == ROLE for row in rows):
        principals = gateway.get(path_of("principals"))["principals"]
        roles = {row["principal"]: row["role"] for row in principals}
    listeners = [row["listener"] for row in gateway.get(path_of("listeners"))["listeners"]]
    known = [{name: row.get(name) for name in ("scope", "name", *Limits._fields)} for row in rows]
    return KnownLimits(known, roles, listeners)


class BridgeRules:
    """The rules of one bridge. One thread replaces `known`, and the bridge's thread asks.

    Args:
        verdicts: The gateway's verdicts on postings of the files.
    """

    def __init__(self, verdicts: VerdictStream) -> None:
        self.known: KnownLimits | None = None
        self.own_before: Collection[str] = ()
        """The mailboxes of the realm `default` with limits of their own, while the gateway has not answered."""
        self._verdicts = verdicts
        self._sees_verdicts = False
        self._rates: TokenBuckets[tuple[str, str]] = TokenBuckets(1, 1)

    @property
    def is_complete(self) -> bool:
        """True if the limits are known, and verdicts arrive."""
        return self.known is not None and self._verdicts.up

    @property
    def own_mailboxes(self) -> Collection[str]:
        """The mailboxes of the realm `default` that have limits of their own."""
        return self.own_before if self.known is None else self.known.own_mailboxes

    def begin(self) -> None:
        """Find out whether verdicts arrive. The answer counts for all postings until the next call."""
        self._sees_verdicts = self._verdicts.up

    def reasons(self, positions: Sequence[Position]) -> list[str | None]:
        """Wait for the verdicts on records, and return for each why its line must be carried again, or None.

        A full mailbox is a reason, and so is a verdict that does not arrive in time. A record that was rejected
        for another reason would be rejected again. While no verdicts arrive, postings have no limits, and
        all is None.
        """
        if not self._sees_verdicts:
            return [None] * len(positions)
        found: list[str | None] = [NO_VERDICT] * len(positions)
        answers = threading.Semaphore(0)

        def take(place: int, verdict: str | None, reason: str | None) -> None:
            if verdict is not None:
                found[place] = MAILBOX_FULL if reason == MAILBOX_FULL else None
            answers.release()

        for place, position in enumerate(positions):
            self._verdicts.ask(position, partial(take, place))
        # Each question is answered once, after `VERDICT_WAIT_S` at the latest.
        for _ in positions:
            answers.acquire()
        return found

    def limits(self, recipient: str) -> Mapping[str, int | None]:
        """Return the limits of a mailbox as fields of `Message`.

        They are empty for no limits, and while no verdicts arrive.
        """
        if self.known is None or not self._sees_verdicts:
            return {}
        return self.known.of(recipient).of_mailbox

    def takes_blobs(self, session: str, recipient: str) -> bool:
        """Return whether a recipient can fetch blobs: whether it is no listener of the XML pump."""
        return session != DEFAULT_REALM or self.known is None or recipient not in self.known.listeners

    def refusal(self, session: str, recipient: str, sender: str, body_bytes: int) -> str | None:
        """Count a posting among those of its sender and return None, or the reason why it must wait.

        `body_bytes` is the length of its body in UTF-8.
        """
        if session == DEFAULT_REALM and recipient in self.own_mailboxes and not self._sees_verdicts:
            return NO_VERDICT
        if self.known is None:
            return None
        limits = self.known.of(sender)
        for what, count, per_minute in (
            ("messages", 1, limits.messages_per_minute),
            ("bytes", body_bytes, limits.bytes_per_minute),
        ):
            # A body above the rate of a minute takes the whole minute: it would wait for ever.
            if per_minute is not None and self._rates.take((sender, what), min(count, per_minute), per_minute):
                return RATE_LIMITED
        return None
