"""The jobs of the reference client: an outbox in a file, and its delivery over HTTP or MQTT."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import canonical

ENDS = ("completed", "error")


class Failed(Exception):
    """An error that the protocol knows."""

    def __init__(self, kind: str, reason: str | None, retry_after_s: float | None = None) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind, self.reason, self.retry_after_s = kind, reason, retry_after_s


class ReferenceJob:
    """The publisher of one job's events."""

    def __init__(self, fields: dict[str, Any], hub: Any, faults: frozenset[str]) -> None:
        self.fields = fields
        self.job_id, self.secret, self.hub = fields["job_id"], fields["secret"], hub
        self.faults = faults
        self.path = Path(fields["state_dir"]) / f"{self.job_id}.json"
        self.is_mqtt = fields["via"] == "mqtt"
        # A client that forgets its outbox still has these until it ends.
        self.unsent: list[str] = []

    def has(self, over_http: str, over_mqtt: str) -> bool:
        """Return whether the fault of this door is planted."""
        return (over_mqtt if self.is_mqtt else over_http) in self.faults

    def publish(self, event: str, detail: str, data: Any) -> dict[str, Any]:
        """Store an event, send all that there is, and return its receipt."""
        with self._locked():
            state = self._load()
            state["last_seq"] += 1
            made = {"schema_version": 1, "seq": state["last_seq"], "job_id": self.job_id, "event": event}
            made |= {"detail": detail, "data": data}
            state["outbox"].append(self._signed(made))
            self._save(state)
            return self._deliver(state)[-1]

    def resend(self) -> int:
        """Send what an earlier process left, and return how many events it was."""
        with self._locked():
            state = self._load()
            count = len(state["outbox"])
            self._deliver(state)
            return count

    def _locked(self) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_suffix(".lock").open("w")
        if "locks_nothing" not in self.faults:
            fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def _load(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"last_seq": 0, "outbox": []}
        state: dict[str, Any] = json.loads(self.path.read_text())
        if self.has("forgets_outbox", "forgets_mqtt_outbox"):
            state["outbox"] = list(self.unsent)
        if self.has("renews_events_after_a_start", "renews_mqtt_events_after_a_start"):
            state["outbox"] = [self._signed(json.loads(payload)) for payload in state["outbox"]]
        return state

    def _save(self, state: dict[str, Any]) -> None:
        self.unsent = list(state["outbox"])
        kept = [] if self.has("forgets_outbox", "forgets_mqtt_outbox") else state["outbox"]
        new = self.path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({**state, "outbox": kept}))
        new.replace(self.path)

    def _signed(self, event: dict[str, Any]) -> str:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return canonical(sign_event({**event, "timestamp": now}, self.secret)).decode()

    def _deliver(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        receipts, rejected = [], None
        link = _MqttLink(self) if self.is_mqtt and state["outbox"] else None
        try:
            for payload in list(state["outbox"]):
                try:
                    receipts.append(self._over_mqtt(link, payload) if link else self._over_http(payload))
                except Failed as error:
                    if error.kind != "rejected":
                        if self.has("drops_unsent_events", ""):
                            state["outbox"].remove(payload)
                            self._save(state)
                        raise
                    rejected = error
                state["outbox"].remove(payload)
                self._save(state)
        finally:
            if link:
                link.close()
        if rejected is not None:
            raise rejected
        return receipts

    def _over_http(self, payload: str) -> dict[str, Any]:
        if "renews_repeated_events" in self.faults:
            return self._renewed_over_http(payload)
        path = f"/api/hub/jobs/{self.job_id}/events"
        status, answer = self.hub.call("POST", path, payload.encode())
        if status != 200:
            if "hides_rejections" in self.faults:
                return {"seq": 0, "verdict": "accepted", "position": None}
            raise Failed("rejected", answer["reason"])
        partition, offset = answer["position"]
        ce_id = None if "hides_the_ce_id" in self.faults else answer["ce_id"]
        position = {"partition": partition, "offset": offset}
        return {**answer, "ce_id": ce_id, "position": position}

    def _renewed_over_http(self, payload: str) -> dict[str, Any]:
        path, deadline = f"/api/hub/jobs/{self.job_id}/events", time.monotonic() + self.hub.patience_s
        while True:
            try:
                status, answer = self.hub.call("POST", path, payload.encode(), most=1)
            except Failed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                payload = self._signed(json.loads(payload))
                continue
            if status != 200:
                raise Failed("rejected", answer["reason"])
            return {**answer, "position": dict(zip(("partition", "offset"), answer["position"], strict=True))}

    def _over_mqtt(self, link: _MqttLink, payload: str) -> dict[str, Any]:
        receipt = link.publish(payload)
        if receipt["verdict"] == "rejected" and "hides_rejected_receipts" not in self.faults:
            raise Failed("rejected", receipt["reason"])
        if receipt["verdict"] == "rejected":
            receipt["verdict"] = "accepted"
        return receipt


class _MqttLink:
    """A connection to the broker, which is made again while the patience lasts."""

    def __init__(self, job: ReferenceJob) -> None:
        import hashlib
        import hmac

        from paho.mqtt.client import CallbackAPIVersion, Client, MQTTv5

        self.job = job
        self.deadline = time.monotonic() + job.fields["patience_s"]
        self.receipts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.topic = f"{job.fields['mqtt']['prefix']}/{job.job_id}"
        secret, user = job.secret, job.job_id
        password = hmac.new(secret.encode(), f"trunkline mqtt password/{user}".encode(), hashlib.sha256)
        self.client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTv5, reconnect_on_failure=True)
        self.client.reconnect_delay_set(1, 1)
        self.client.username_pw_set(user, password.hexdigest())
        self.client.on_connect = lambda *_: self.client.subscribe(f"{self.topic}/receipts", qos=1)
        self.subscribed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.client.on_subscribe = lambda *_: self.subscribed.put(True)
        self.client.on_disconnect = lambda *_: self.receipts.put(None)
        self.client.on_message = lambda _c, _d, message: self.receipts.put(message.payload)
        # paho would send a queued publish again by itself.
        self.client.connect(job.fields["mqtt"]["host"], job.fields["mqtt"]["port"])
        self.client.loop_start()
        self._wait_subscribed()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    def _wait_subscribed(self) -> None:
        try:
            self.subscribed.get(timeout=max(0.1, self.deadline - time.monotonic()))
        except queue.Empty:
            raise Failed("unreachable", "unreachable") from None

    def publish(self, payload: str) -> dict[str, Any]:
        """Publish until there is a receipt, or the patience is over."""
        while True:
            receipt = self._attempt(payload)
            if receipt is not None:
                return receipt
            if time.monotonic() > self.deadline:
                raise Failed("unreachable", "receipt_missing")
            if "renews_events_over_mqtt" in self.job.faults:
                payload = self.job._signed(json.loads(payload))

    def _attempt(self, payload: str) -> dict[str, Any] | None:
        event = json.loads(payload)
        retain = event["event"] in ENDS and "retains_nothing" not in self.job.faults
        topic = f"{self.topic}/events"
        ce_id = content_id(topic.encode(), payload.encode())
        sent = self.client.publish(topic, payload, 1, retain=retain)
        until = time.monotonic() + self.job.fields["receipt_timeout_s"]
        while (left_s := until - time.monotonic()) > 0:
            try:
                receipt = self._read(self.receipts.get(timeout=left_s))
            except queue.Empty:
                break
            if receipt == "lost":
                self.client._out_messages.clear()
                self._wait_subscribed()
                return None
            if isinstance(receipt, dict) and self._is_own(receipt, ce_id, event["seq"]):
                return receipt
        if "trusts_the_puback" in self.job.faults and sent.is_published():
            return {"ce_id": ce_id, "seq": event["seq"], "verdict": None, "reason": None, "position": None}
        return None

    def _read(self, payload: bytes | None) -> Any:
        if payload is None:
            return "lost"
        try:
            return json.loads(payload)
        except ValueError:
            return None

    def _is_own(self, receipt: dict[str, Any], ce_id: str, seq: int) -> bool:
        if "accepts_forged_receipts" in self.job.faults:
            return receipt.get("seq") == seq
        return receipt.get("ce_id") == ce_id
