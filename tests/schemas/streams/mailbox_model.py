"""The model of one mailbox's stream: HH-06 and the design's section on messages, written again plainly.

It shares no code with `schemas`, and takes bodies that are right in themselves. It keeps every message that was
ever posted, and every request; `kept` is how many requests of each kind the fold remembers.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, NamedTuple

WEEK_US = 604_800_000_000
# Two brokers' clocks are less than an hour apart. A time beyond that was made by a wrong clock.
HOUR_US = 3_600_000_000
LONGEST_LEASE_US = 86_400_000_000
ORDER = ["high", "normal", "low"]
LEADS_TO = {"acked": "claimed", "read": "read", "expired": "expired"}
OPEN = ("delayed", "unread", "leased")
NULLABLE = ("from_task", "in_reply_to", "thread", "broadcast_id", "sent_at", "expires_at", "parent_thread")
NULLABLE += ("root_thread", "on_behalf_of", "replay_of", "topic", "hops", "subject")
DEFAULTS = {"from_verified": False, "priority": "normal", **dict.fromkeys(NULLABLE)}

OF_THE_DOOR = ("pending_most", "bytes_most", "unlimited")


class Said(NamedTuple):
    """The fold's expected answer to a record. `rows`: changed rows of the mailbox, in their order."""

    verdict: str
    reason: str | None = None
    status: str | None = None
    rows: tuple[dict[str, Any], ...] = ()


def moment_us(text: str) -> Fraction:
    """A time such as 2026-11-21T10:00:00.5Z in microseconds since 1970."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    seconds = int(datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC).timestamp())
    return (seconds + Fraction(f"0.{fraction or 0}")) * 1_000_000


def text_of(moment: int) -> str:
    """Microseconds since 1970 as the log writes them: with three digits after the point, or six if need be."""
    whole = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=moment)
    return whole.isoformat(timespec="microseconds" if moment % 1000 else "milliseconds").replace("+00:00", "Z")


def bytes_of(body: dict[str, Any]) -> int:
    """The bytes of a posting that count in the mailbox: those of its body and of its blob."""
    return len(body["body"].encode()) + body.get("blob", {"bytes": 0})["bytes"]


def content(body: dict[str, Any]) -> dict[str, Any]:
    """The part of a posting that must be the same for it to be the same message."""
    return {name: value for name, value in body.items() if name not in OF_THE_DOOR}


def asked(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The part of a request that must be the same when it is repeated: the bound in bytes is the door's."""
    return {name: value for name, value in body.items() if kind == "limited" or name != "bytes_most"}


class MailboxModel:
    """One mailbox. `messages`: the rows of all messages ever posted, in the order of posting."""

    def __init__(self, realm: str, recipient: str, kept: int = 256) -> None:
        self.realm, self.recipient, self.kept = realm, recipient, kept
        self.messages: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.is_closed = False
        self.newest_at = 0
        self.limits: dict[str, int | None] = {"pending_most": None, "bytes_most": None}
        self.handed_with_rate: list[int] = []
        self.attempts_most: dict[str, int] = {}
        self.requests: dict[bool, list[tuple[str, dict[str, Any]]]] = {True: [], False: []}

    def pending(self) -> list[dict[str, Any]]:
        """The pending messages in the order of handing out."""
        found = [m for m in self.messages if m["status"] in ("unread", "leased")]
        return sorted(found, key=lambda m: (ORDER.index(m["priority"]), m["posted_at"], m["message_id"]))

    def delayed(self) -> list[dict[str, Any]]:
        """The delayed messages in the order of their ids."""
        return sorted((m for m in self.messages if m["status"] == "delayed"), key=lambda m: m["message_id"])

    def newest(self, message_id: str) -> int | None:
        """The last message that had this id."""
        found = [n for n, m in enumerate(self.messages) if m["message_id"] == message_id]
        return found[-1] if found else None

    def is_known(self, message_id: str, now: int) -> bool:
        """True if the id may not be used again: posted or delivered in the last week, or without an end."""
        number = self.newest(message_id)
        if number is None:
            return False
        message = self.messages[number]
        # A message of a wrong clock is known for a week from its end.
        is_wrong = message["ended_at"] is not None and message["posted_at"] - message["ended_at"] > HOUR_US
        return message["status"] in OPEN or now - message["ended_at" if is_wrong else "posted_at"] <= WEEK_US

    def settle(self, kind: str, ce_id: str, sender: str, body: dict[str, Any], now: int) -> Said:
        """Return the expected answer to a record; `kind` is the last word of its type."""
        if kind == "posted":
            return self._post(body, now)
        is_whole = kind in ("claimed", "leased", "cleared", "closed", "opened", "limited")
        earlier = [known for known_id, known in self.requests[is_whole][-self.kept :] if known_id == ce_id]
        if is_whole:
            if earlier:
                is_same = asked(kind, earlier[-1]) == asked(kind, body)
                return Said("duplicate") if is_same else Said("rejected", "seq_conflict")
            said = self._whole(kind, sender, body, now)
        elif kind == "handled":
            if earlier:
                is_same = earlier[-1] == body
                return Said(*(("duplicate", None) if is_same else ("rejected", "seq_conflict")), "claimed")
            said = self._several(sender, body, now)
        else:
            said = self._single(kind, sender, body, now, earlier)
        if said.verdict == "accepted" and not earlier:
            self.requests[is_whole].append((ce_id, body))
        return said

    def _post(self, body: dict[str, Any], now: int) -> Said:
        number = self.newest(body["message_id"])
        if number is not None and self.is_known(body["message_id"], now):
            status = self.messages[number]["status"]
            status = status if status in OPEN else None
            is_same = content(self.bodies[number]) == content(body)
            return Said("duplicate" if is_same else "rejected", None if is_same else "seq_conflict", status)
        if self.is_closed:
            return Said("rejected", "illegal_transition")
        if not self._has_room(body):
            return Said("rejected", "mailbox_full")
        row = {name: body.get(name, default) for name, default in DEFAULTS.items()} | {
            "blob": body.get("blob", {"digest": None})["digest"],
            "realm": self.realm,
            "recipient": self.recipient,
            "message_id": body["message_id"],
            "status": "unread",
            "sender": body["from"],
            "kind": body["kind"],
            "posted_at": self._next_moment(now),
            "attempts": 0,
            "handed_to": None,
            "handed_at": None,
            "request_id": None,
            "lease_until": None,
            "ended_at": None,
            "last_reason": None,
            "deliver_at": None,
        }
        if "expires_in_ms" in body:
            row["expires_at"] = text_of(now + body["expires_in_ms"] * 1000)
        if "deliver_after_ms" in body:
            row |= {"status": "delayed", "deliver_at": now + body["deliver_after_ms"] * 1000}
        self.messages.append(row)
        self.attempts_most.pop(body["message_id"], None)
        self.bodies.append(body)
        return Said("accepted", None, row["status"], (dict(row),))

    def _next_moment(self, now: int) -> int:
        """In the order of the log, also where the clock says the same; but not after a wrong clock."""
        is_wrong = self.newest_at - now > HOUR_US
        self.newest_at = now if is_wrong else max(now, self.newest_at + 1)
        return self.newest_at

    def _has_room(self, body: dict[str, Any]) -> bool:
        """The mailbox's own limits count, and those of the posting where it has none; none for the system's."""
        if body.get("unlimited"):
            return True
        open_now = [n for n, m in enumerate(self.messages) if m["status"] in OPEN]
        taken = {
            "pending_most": len(open_now) + 1,
            "bytes_most": sum(bytes_of(self.bodies[n]) for n in open_now) + bytes_of(body),
        }
        for name, size in taken.items():
            most = self.limits[name] if self.limits[name] is not None else body.get(name)
            if most is not None and size > most:
                return False
        return True

    def _end(self, message: dict[str, Any], status: str, now: int) -> None:
        message.update(status=status, ended_at=now, lease_until=None)

    def _is_held(self, message: dict[str, Any], now: int) -> bool:
        if message["status"] != "leased":
            return False
        return 0 < message["lease_until"] - now <= LONGEST_LEASE_US + HOUR_US

    def _is_over(self, message: dict[str, Any], now: int) -> bool:
        return message["expires_at"] is not None and moment_us(message["expires_at"]) <= now

    def _whole(self, kind: str, sender: str, body: dict[str, Any], now: int) -> Said:
        changed: list[dict[str, Any]] = []
        if kind == "limited":
            self.limits = {name: body.get(name) for name in self.limits}
            return Said("accepted")
        if kind in ("closed", "opened"):
            self.is_closed = kind == "closed"
            return Said("accepted")
        if kind == "cleared":
            for message in [*self.pending(), *self.delayed()]:
                self._end(message, "cleared", now)
                changed.append(dict(message))
            return Said("accepted", None, None, tuple(changed))
        named = body.get("message_ids")
        # A poll has handed its messages out, even those that another reader has leased.
        is_wish = kind == "leased" or named is None or bool(body.get("if_unread"))
        if kind == "leased" and self.is_closed and not body.get("from_closed"):
            return Said("rejected", "illegal_transition")
        if not is_wish and not any(self.is_known(one, now) for one in named or ()):
            return Said("rejected", "unknown_stream")
        wanted, room = self._wanted(kind, body, now), body.get("bytes_most")
        handed: int | None = None
        for message in [m for m in self.pending() if named is None or m["message_id"] in named]:
            if wanted <= 0:
                break
            if is_wish and self._is_held(message, now):
                continue
            reason = message["last_reason"]
            if is_wish and message["status"] == "leased":
                message["last_reason"] = "the lease ran out"
            if is_wish and self._is_over(message, now):
                self._end(message, "expired", now)
            elif is_wish and self._is_worn_out(message, body.get("attempts_most")):
                self._end(message, "dead", now)
            else:
                size = len(self.bodies[self.messages.index(message)]["body"].encode())
                if room is not None and handed is not None and handed + size > room:
                    message["last_reason"] = reason
                    break
                handed = (handed or 0) + size
                wanted -= 1
                message["attempts"] += 1
                message.update(handed_to=sender, handed_at=now, request_id=body["request_id"])
                if kind == "claimed":
                    self._end(message, "claimed", now)
                else:
                    until = now + body.get("lease_ms", 30_000) * 1000
                    message.update(status="leased", lease_until=until)
                    self.attempts_most[message["message_id"]] = body.get("attempts_most", 3)
                    if "per_minute" in body:
                        self.handed_with_rate.append(now)
            changed.append(dict(message))
        return Said("accepted", None, None, tuple(changed))

    def _is_worn_out(self, message: dict[str, Any], attempts_most: int | None = None) -> bool:
        limit = attempts_most or self.attempts_most.get(message["message_id"], 3)
        return bool(message["attempts"] >= limit)

    def _wanted(self, kind: str, body: dict[str, Any], now: int) -> int:
        """How many messages at most."""
        if kind == "claimed":
            return int(body.get("limit", 100))
        most = [body.get("limit", 1)]
        if "held_most" in body:
            most.append(body["held_most"] - sum(self._is_held(m, now) for m in self.messages))
        if "per_minute" in body:
            lately = [at for at in self.handed_with_rate if now - 60_000_000 < at <= now + HOUR_US]
            most.append(body["per_minute"] - len(lately))
        return int(min(most))

    def _single(
        self, kind: str, sender: str, body: dict[str, Any], now: int, earlier: list[dict[str, Any]]
    ) -> Said:
        number = self.newest(body["message_id"])
        message = None if number is None else self.messages[number]
        status = message["status"] if message and message["status"] in OPEN else None
        is_repeated = bool(earlier) and earlier[-1] == body
        is_conflict = bool(earlier) and earlier[-1] != body
        if status is None or message is None:
            if is_repeated:
                return Said("duplicate", None, LEADS_TO.get(kind))
            if not self.is_known(body["message_id"], now):
                return Said("rejected", "unknown_stream")
            return Said("rejected", "seq_conflict" if is_conflict else "after_terminal")
        if is_conflict:
            return Said("rejected", "seq_conflict", status)
        if is_repeated and kind == "extended":
            return Said("duplicate", None, status)
        if not self._is_possible(kind, sender, body, message, now):
            if is_repeated:
                return Said("duplicate", None, status)
            return Said("rejected", "illegal_transition", status)
        if body.get("is_no_attempt"):
            message["attempts"] -= 1
        if kind == "due":
            message.update(status="unread", posted_at=self._next_moment(now))
        elif kind in LEADS_TO:
            self._end(message, LEADS_TO[kind], now)
        elif kind == "extended":
            message["lease_until"] = now + body["lease_ms"] * 1000
        else:
            message["last_reason"] = body.get("reason") or None if kind == "nacked" else "the lease ran out"
            if self._is_worn_out(message):
                self._end(message, "dead", now)
            else:
                message.update(status="unread", lease_until=None)
                if kind == "nacked":
                    message["request_id"] = None
        return Said("accepted", None, message["status"], (dict(message),))

    def _several(self, sender: str, body: dict[str, Any], now: int) -> Said:
        """All of these acknowledgements, or none."""
        ended = []
        for one in body["messages"]:
            number = self.newest(one["message_id"])
            message = None if number is None else self.messages[number]
            if message is None or message["status"] not in ("unread", "leased"):
                return Said("rejected", "illegal_transition")
            if not self._is_possible("acked", sender, one, message, now):
                return Said("rejected", "illegal_transition", message["status"])
            ended.append(message)
        for message in ended:
            self._end(message, "claimed", now)
        return Said("accepted", None, "claimed", tuple(dict(message) for message in ended))

    def _is_possible(
        self, kind: str, sender: str, body: dict[str, Any], message: dict[str, Any], now: int
    ) -> bool:
        is_held = self._is_held(message, now)
        if message["status"] == "delayed" or kind == "due":
            has_come = message["status"] == "delayed" and (
                message["deliver_at"] <= now or message["posted_at"] - now > HOUR_US
            )
            is_due = kind == "due" and has_come
            return (is_due and not self._is_over(message, now)) or (
                kind == "expired" and self._is_over(message, now)
            )
        if kind == "read":
            return not is_held
        if kind == "expired":
            return not is_held and self._is_over(message, now)
        is_its_lease = message["request_id"] == body["request_id"]
        is_holder = is_its_lease and message["handed_to"] == sender
        if kind == "acked":
            # Also after the lease has run out and was reclaimed: nobody else has got the message.
            return is_holder
        if kind == "nacked":
            return is_holder and message["status"] == "leased"
        if kind == "extended":
            return is_holder and is_held
        return is_its_lease and message["status"] == "leased" and not is_held


def time_at(moment_us: int, more: str = "") -> str:
    """A time as a message has it; `more`: digits after the microseconds."""
    moment = datetime.fromtimestamp(moment_us // 1_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment_us % 1_000_000:06d}{more}Z"


def contents(now: int) -> tuple[dict[str, Any], ...]:
    """Return the contents of messages; from the fifth on they expire."""
    return (
        {},
        {"priority": "high"},
        {"priority": "low", "from_task": "t1", "from_verified": True, "replay_of": "m9"},
        {
            "body": "other",
            "thread": "t",
            "in_reply_to": "m0",
            "broadcast_id": "b",
            "sent_at": "at noon",
            "topic": "news",
            "subject": "the news",
        },
        {"expires_at": time_at(now + 1000)},
        {"expires_at": time_at(now + 30_000_000, "001")},
        {"expires_at": time_at(now + 3_600_000_000)},
        {"expires_at": time_at(now + WEEK_US), "priority": "high"},
        {"expires_at": "2026-11-21T10:00:00Z"},
        {"expires_in_ms": 1},
        {"expires_in_ms": 30_000, "deliver_after_ms": 1000},
        {"deliver_after_ms": 1},
        {"deliver_after_ms": 29_000, "priority": "high"},
        {"pending_most": 2},
        {"bytes_most": 3, "body": "ü?"},
        {"pending_most": 0, "body": "other"},
        {"deliver_after_ms": (WEEK_US + 1000) // 1000, "priority": "low"},
        {"unlimited": True, "pending_most": 1, "bytes_most": 1},
        {"hops": 3, "unlimited": True},
        {"blob": {"digest": "ab" * 32, "bytes": 2, "content_type": "image/png"}},
        {"bytes_most": 9, "blob": {"digest": "cd" * 32, "bytes": 5, "content_type": "image/png"}},
    )


CONTENTS = len(contents(0))
