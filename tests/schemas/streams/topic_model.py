"""A model of a topic that remembers everything: what is subscribed and published by the rules in words.

It shares no code with the fold. Its subscribers are those that the whole history leaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

WEEK_US = 7 * 24 * 3600 * 1_000_000
REQUESTS_KEPT = 256


class Said(NamedTuple):
    """Verdict, reason, status of the subscription or message, and the changed rows."""

    verdict: str
    reason: str | None = None
    status: str | None = None
    rows: tuple[dict[str, Any], ...] = ()


class TopicModel:
    """A topic: all that has happened to it, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.created: tuple[str, int] | None = None
        # Each change: name, whether it begins, when, by whom.
        self.changes: list[tuple[str, bool, int, str]] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.published: list[dict[str, Any]] = []

    def settle(self, kind: str, ce_id: str, sender: str, body: dict[str, Any], offset: int, now: int) -> Said:
        """Settle one record of the type `topic.<kind>`."""
        if self.created is None and kind != "subscribed":
            return Said("rejected", "unknown_stream")
        if kind == "published":
            return self._publish(body, offset, now)
        if kind == "delivered":
            return self._deliver(body, now)
        return self._subscription(kind == "subscribed", ce_id, sender, body, now)

    def subscribers(self) -> list[str]:
        """The names whose last change is a beginning."""
        last = {name: begins for name, begins, _, _ in self.changes}
        return sorted(name for name, begins in last.items() if begins)

    def row(self) -> dict[str, Any]:
        """The row of the topic."""
        by, at = self.created or ("", 0)
        last = self.published[-1] if self.published else None
        return {
            "topic": self.name,
            "subscribers": len(self.subscribers()),
            "created_by": by,
            "created_at": at,
            "publications": len(self.published),
            "undelivered": sum(len(one["to"]) for one in self.published if one["delivered_at"] is None),
            "last_message_id": last and last["body"]["message_id"],
            "last_published_at": last and last["at"],
        }

    def _subscription(self, begins: bool, ce_id: str, sender: str, body: dict[str, Any], now: int) -> Said:
        name = body["subscriber"]
        is_in = name in self.subscribers()
        status = "subscribed" if is_in else "unsubscribed"
        for known_id, known in self.requests[-REQUESTS_KEPT:]:
            if known_id == ce_id:
                is_same = known == body
                return Said(*(("duplicate", None) if is_same else ("rejected", "seq_conflict")), status)
        since = next((at for who, _, at, _ in reversed(self.changes) if who == name), None)
        if begins == is_in or (not begins and body.get("since", since) != since):
            return Said("duplicate", None, status)
        self.created = self.created or (sender, now)
        began = (now, sender) if begins else self._began(name)
        self.changes.append((name, begins, now, sender))
        self.requests.append((ce_id, body))
        row = {
            "topic": self.name,
            "subscriber": name,
            "status": "subscribed" if begins else "unsubscribed",
            "since": began[0],
            "subscribed_by": began[1],
            "until": None if begins else now,
            "unsubscribed_by": None if begins else sender,
        }
        return Said("accepted", None, str(row["status"]), (self.row(), row))

    def _began(self, name: str) -> tuple[int, str]:
        return next((at, by) for who, begins, at, by in reversed(self.changes) if who == name and begins)

    def _newest(self, message_id: str) -> dict[str, Any] | None:
        found = (one for one in reversed(self.published) if one["body"]["message_id"] == message_id)
        return next(found, None)

    def _publish(self, body: dict[str, Any], offset: int, now: int) -> Said:
        known = self._newest(body["message_id"])
        if known is not None and (known["delivered_at"] is None or now - known["at"] <= WEEK_US):
            status = "publishing" if known["delivered_at"] is None else "delivered"
            if known["body"] == body:
                return Said("duplicate", None, status)
            return Said("rejected", "seq_conflict", status)
        to = self.subscribers()
        made = {"body": body, "to": to, "at": now, "offset": offset, "delivered_at": None if to else now}
        self.published.append(made)
        row = self._message_row(made)
        return Said("accepted", None, row["status"], (self.row(), row))

    def _deliver(self, body: dict[str, Any], now: int) -> Said:
        known = self._newest(body["message_id"])
        if known is None:
            return Said("rejected", "unknown_stream")
        if known["delivered_at"] is not None:
            return Said("duplicate", None, "delivered")
        known |= {"delivered_at": now, "refused": (body.get("refused_count", 0), body.get("refused"))}
        return Said("accepted", None, "delivered", (self.row(), self._message_row(known)))

    def _message_row(self, made: dict[str, Any]) -> dict[str, Any]:
        is_delivered = made["delivered_at"] is not None
        return {
            "topic": self.name,
            "message_id": made["body"]["message_id"],
            "status": "delivered" if is_delivered else "publishing",
            "sender": made["body"]["from"],
            "kind": made["body"]["kind"],
            "recipient_count": len(made["to"]),
            "recipients": None if is_delivered else made["to"],
            "published_at": made["at"],
            "published_offset": made["offset"],
            "delivered_at": made["delivered_at"],
            "refused_count": made.get("refused", (0, None))[0],
            "refused": made.get("refused", (0, None))[1],
            "blob": made["body"].get("blob", {"digest": None})["digest"],
        }
