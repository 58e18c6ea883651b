"""A small client behind the protocol of conformance checks, right without arguments, wrong with `--fault NAME`.

Each fault is a mistake that clients make; `planted_faults` names the check that must find it.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import time
import uuid
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from tests.connectors.tools.conformance.reference_jobs import Failed, ReferenceJob
from trunkline_agent.hub.answer_errors import retry_after_s
from trunkline_agent.hub.hub_requests import Handling
from trunkline_agent.wire.signing import SIGNATURE_FIELD, Signer, sign_event
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode_slowly

FEATURES = ["canonical", "signing", "hub", "extend", "keeps_leases", "ask", "topics", "handlings", "discovery"]
FEATURES += ["ends_long_handlings", "schedules", "blobs", "job_http", "job_mqtt"]
KINDS = {404: "not_found", 410: "not_found", 429: "rate_limited", 400: "usage", 413: "usage", 422: "usage"}
KINDS |= {401: "refused", 403: "refused", 409: "refused", 415: "usage"}
AGAIN = {408, 429, 502, 503, 504}
MESSAGES = "/api/hub/messages"


class Hub:
    """The hub over HTTP: one request at a time, repeated as it must be."""

    def __init__(self, hub: dict[str, str], patience_s: float, faults: frozenset[str]) -> None:
        self.url, self.token = urlsplit(hub["url"]), hub["token"]
        self.patience_s = patience_s
        self.faults = faults

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        wait_s: float = 0.0,
        most: int = 1000,
        again: Any = lambda headers: headers,
    ) -> tuple[int, dict[str, Any]]:
        """Send a request until it has an answer. Returns its status and JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **(headers or {})}
        deadline = time.monotonic() + self.patience_s
        for attempt in range(1, most + 1):
            pause_s, kind = 0.1, "unreachable"
            try:
                status, more, found = self._once(method, path, content, given, wait_s)
            except (OSError, http.client.HTTPException):
                reason, retry_after = "unreachable", None
            else:
                reason = found.get("reason") if isinstance(found, dict) else None
                if status not in AGAIN or (reason == "launch_failed" and status == 502):
                    return status, found
                retry_after = self._retry_after(more)
                kind = KINDS.get(status, kind)
                if "ignores_retry_after" not in self.faults:
                    pause_s = retry_after
            if time.monotonic() + pause_s > deadline or attempt == most:
                raise Failed(kind, reason, retry_after if kind == "rate_limited" else None)
            time.sleep(pause_s)
            given = again(given)
        raise AssertionError

    def _retry_after(self, header: str | None) -> float:
        if header is None or header[0].isdigit():
            return float(header or 0.1)
        return 0.1 if "reads_no_dates" in self.faults else retry_after_s({"retry-after": header})

    def _kind(self, status: int, reason: str | None) -> str:
        if status == 415 and "has_no_kind_for_415" in self.faults:
            return "failed"
        return "refused" if reason == "launch_failed" and status == 502 else KINDS.get(status, "failed")

    def _once(
        self, method: str, path: str, content: bytes, headers: dict[str, str], wait_s: float
    ) -> tuple[int, str | None, dict[str, Any]]:
        link = http.client.HTTPConnection(self.url.hostname or "", self.url.port, timeout=wait_s + 10)
        try:
            link.request(method, path, None if method == "GET" else content, headers)
            answer = link.getresponse()
            found = answer.read()
            is_json = answer.getheader("Content-Type") == "application/json"
            return answer.status, answer.getheader("Retry-After"), json.loads(found) if is_json else found
        finally:
            link.close()

    def content(self, path: str) -> bytes:
        """Return the bytes of a blob."""
        found: Any = self.call("GET", path)[1]
        return found if isinstance(found, bytes) else json.dumps(found).encode()

    def done(self, method: str, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        """Send a request that must succeed, and return the answer."""
        if method == "POST":
            more.setdefault("headers", {"Idempotency-Key": str(uuid.uuid4())})
        status, answer = self.call(method, path, body, **more)
        if status >= 300:
            raise Failed(self._kind(status, answer.get("reason")), answer.get("reason"))
        return answer


class ReferenceClient:
    """Answers requests of the kit."""

    def __init__(self, faults: frozenset[str]) -> None:
        self.faults = faults
        self.jobs: dict[str, ReferenceJob] = {}
        self.settled: dict[str, str] = {}
        self.leases: dict[str, tuple[str, dict[str, Any], float, float]] = {}
        self.hub: Hub
        self.one_key = str(uuid.uuid4())
        self.handlings: dict[str, Handling] = {}
        self.ends: dict[str, float] = {}

    def hello(self, **_: Any) -> dict[str, Any]:
        return {"protocol": 1, "name": "reference", "version": "1", "features": FEATURES}

    def canonical(self, json_base64: str) -> dict[str, Any]:
        data = base64.b64decode(json_base64)
        document = json.loads(data) if "accepts_repeated_keys" in self.faults else self._decoded(data)
        written = canonical(document).decode()
        if "refuses_64_levels" in self.faults and written.startswith("[" * 64):
            raise Failed("malformed", "malformed")
        if "writes_whole_floats_as_integers" in self.faults:
            written = re.sub(r"(\d)\.0(?=[,\]])", r"\1", written)
        if "escapes_separators" in self.faults:
            written = written.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        if "sorts_by_utf16" in self.faults and isinstance(document, dict):
            keys = sorted(document, key=lambda key: key.encode("utf-16-be"))
            pairs = (f"{canonical(key).decode()}:{canonical(document[key]).decode()}" for key in keys)
            written = f"{{{','.join(pairs)}}}"
        return {"canonical_base64": base64.b64encode(written.encode()).decode()}

    def _decoded(self, data: bytes) -> Any:
        try:
            return decode_slowly(data)
        except MalformedJsonError:
            raise Failed("malformed", "malformed") from None

    def sign_event(self, json_base64: str, secret: str) -> dict[str, Any]:
        event = self._decoded(base64.b64decode(json_base64))
        if "signs_the_old_signature" in self.faults:
            return {"hmac_sig": Signer(secret).hexdigest(canonical(event))}
        return {"hmac_sig": sign_event(event, secret)["data"][SIGNATURE_FIELD]}

    def open(self, name: str, hub: dict[str, str], patience_s: float) -> dict[str, Any]:
        del name
        self.hub = Hub(hub, patience_s, self.faults)
        return {}

    def send(
        self,
        to: str,
        type: str,  # noqa: A002
        payload: Any = None,
        while_handling: str | None = None,
        key: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        if "drops_nulls" in self.faults and isinstance(payload, dict):
            payload = {key: value for key, value in payload.items() if value is not None}
        if while_handling is not None and "sends_again_after_a_kill" not in self.faults:
            content = json.dumps({"recipient": to, "type": type, "payload": payload}).encode()
            key = self.handlings[while_handling].content_key("message", content).text
        new_key = self.one_key if "reuses_the_idempotency_key" in self.faults else str(uuid.uuid4())
        is_reply, key = key is not None, key or new_key
        renewed = "ignores_idempotency_key" in self.faults
        again = (lambda h: {**h, "Idempotency-Key": str(uuid.uuid4())}) if renewed else (lambda h: h)
        body = {"recipient": to, "type": type, "payload": payload, **more}
        if payload is None and "sends_no_null" in self.faults:
            del body["payload"]
        most = 2 if "retries_once" in self.faults else 1000
        try:
            answer = self.hub.done(
                "POST", MESSAGES, body, headers={"Idempotency-Key": key}, most=most, again=again
            )
        except Failed as error:
            if error.kind == "unreachable" and "invents_success" in self.faults:
                return {"message_id": key}
            if is_reply and error.reason == "seq_conflict":
                return {"message_id": None}
            if error.kind == "not_found" and "has_one_kind_of_error" in self.faults:
                raise Failed("failed", error.reason) from None
            if "hides_retry_after" in self.faults:
                raise Failed(error.kind, error.reason) from None
            raise
        if "message_id" not in answer and "believes_any_answer" not in self.faults:
            raise Failed("failed", "not_a_gateway")
        return {"message_id": answer.get("message_id")}

    def lease(self, wait_s: float, lease_s: int, longest_s: float | None = None) -> dict[str, Any]:
        if not 1 <= lease_s <= 86_400 and "leases_without_end" not in self.faults:
            raise Failed("usage", "usage")
        if "returns_early" in self.faults:
            wait_s /= 2
        path = f"{MESSAGES}?limit=1&wait={wait_s}&lease={lease_s}"
        headers = {"X-Request-ID": str(uuid.uuid4())}
        renewed = "leases_anew" in self.faults
        again = (lambda h: {**h, "X-Request-ID": str(uuid.uuid4())}) if renewed else (lambda h: h)
        answer = self.hub.done("GET", path, headers=headers, wait_s=wait_s, again=again)
        if not answer["messages"]:
            return {"message": None}
        message = answer["messages"][0]
        self.settled.pop(message["id"], None)
        self.leases[message["id"]] = (answer["lease_id"], message, lease_s, time.monotonic() + lease_s / 3)
        if "acks_before_handling" in self.faults:
            self._of_lease("ack", message["id"])
        self.handlings[message["id"]] = Handling(message["id"], message["attempt"])
        if longest_s is not None and "hangs_for_ever" not in self.faults:
            self.ends[message["id"]] = time.monotonic() + longest_s
        if "parses_texts" in self.faults and isinstance(message["payload"], str):
            message["payload"] = {"42": 42, "true": True}.get(message["payload"], message["payload"])
        names = ("id", "sender", "type", "payload", "attempt", "in_reply_to", "thread", "subject", "topic")
        return {"message": {name: message.get(name) for name in names}}

    def ack(self, message_id: str) -> dict[str, Any]:
        most = 1 if "repeats_no_ack" in self.faults else 1000
        return self._settled("ack", message_id, most=most)

    def nack(self, message_id: str, error: str) -> dict[str, Any]:
        if "acknowledges_failures" in self.faults:
            return self._settled("ack", message_id)
        if "sends_reasons_as_they_are" not in self.faults:
            error = "".join(one if one.isprintable() else " " for one in error)[:500]
        return self._settled("nack", message_id, {"reason": error})

    def fail(self, message_id: str, text: str) -> dict[str, Any]:
        reason = text if "shows_the_text_of_errors" in self.faults else "RuntimeError"
        return self._settled("nack", message_id, {"reason": reason})

    def extend(self, message_id: str, lease_s: int) -> dict[str, Any]:
        if "extends_nothing" not in self.faults:
            self._of_lease("extend", message_id, {"lease": lease_s})
        return {}

    def _settled(self, how: str, message_id: str, fields: Any = None, most: int = 1000) -> dict[str, Any]:
        before = self.settled.get(message_id, how)
        if before != how:
            raise Failed("usage", "usage")
        if message_id not in self.settled:
            try:
                self._of_lease(how, message_id, fields, most)
            except Failed:
                if "forgets_refused_acks" in self.faults:
                    self._end(how, message_id)
                raise
            self._end(how, message_id)
        return {}

    def _end(self, how: str, message_id: str) -> None:
        self.settled[message_id] = how
        del self.leases[message_id]

    def _of_lease(self, how: str, message_id: str, fields: Any = None, most: int = 1000) -> None:
        lease_id = self.leases[message_id][0]
        body = {"lease_id": lease_id, "message_ids": [message_id], **(fields or {})}
        answer = self.hub.done("POST", f"{MESSAGES}/{how}", body, most=most)
        if answer["refused"] and "ignores_lost_leases" not in self.faults:
            raise Failed("lease_lost", answer["refused"][0]["reason"])

    def keep_leases(self) -> None:
        """Extend what is due. Called between requests."""
        if "lets_leases_end" in self.faults:
            return
        for message_id in [one for one, end in self.ends.items() if time.monotonic() > end]:
            del self.ends[message_id]
            self._of_lease("nack", message_id, {"reason": "it took too long"})
        for message_id, (lease_id, message, lease_s, due) in list(self.leases.items()):
            if time.monotonic() > due:
                self.leases[message_id] = lease_id, message, lease_s, time.monotonic() + lease_s / 3
                try:
                    self._of_lease("extend", message_id, {"lease": lease_s})
                except Failed:
                    continue

    def reply(self, message_id: str, type: str, payload: Any) -> dict[str, Any]:  # noqa: A002
        message = self.leases[message_id][1]
        about = {"in_reply_to": message_id, "thread": message.get("thread")}
        if "replies_without_reference" in self.faults:
            about = {}
        key = self.handlings[message_id].reply_key().text
        if "answers_again_after_a_kill" in self.faults:
            key = str(uuid.uuid4())
        return self.send(message["sender"], type, payload, key=key, **about)

    def ask(self, to: str, type: str, payload: Any, wait_s: float) -> dict[str, Any]:  # noqa: A002
        body = {"recipient": to, "type": type, "payload": payload}
        if "takes_the_next_message_as_reply" in self.faults:
            self.hub.done("POST", MESSAGES, body)
            found = self.hub.done("GET", f"{MESSAGES}?limit=1&wait={wait_s}", wait_s=wait_s)["messages"]
            if not found:
                raise Failed("no_reply", "no_reply")
            return {"reply": found[0]}
        answer = self.hub.done("POST", f"{MESSAGES}?wait_reply={wait_s}", body, wait_s=wait_s)
        if "reply" not in answer and "invents_replies" not in self.faults:
            raise Failed("no_reply", "no_reply")
        return {"reply": answer.get("reply")}

    def publish(self, topic: str, type: str, payload: Any) -> dict[str, Any]:  # noqa: A002
        answer = self.hub.done("POST", f"/api/hub/topics/{quote(topic)}", {"type": type, "payload": payload})
        return {"message_id": answer["message_id"]}

    def subscribe(self, topic: str) -> dict[str, Any]:
        self.hub.done("POST", f"/api/hub/topics/{quote(topic)}/subscribe", {})
        return {}

    def unsubscribe(self, topic: str) -> dict[str, Any]:
        if "forgets_to_unsubscribe" not in self.faults:
            self.hub.done("POST", f"/api/hub/topics/{quote(topic)}/unsubscribe", {})
        return {}

    def status(self, state: str, text: str) -> dict[str, Any]:
        payload = {"status": state} if "reports_no_text" in self.faults else {"status": state, "text": text}
        return self.send("hub", "status", payload)

    def discover(self, capability: str | None = None, status: str | None = None) -> dict[str, Any]:
        if "ignores_the_capability" in self.faults:
            capability = None
        query = {name: one for name, one in (("capability", capability), ("status", status)) if one}
        found = self.hub.done("GET", f"/api/hub/participants?{urlencode(query)}")["participants"]
        return {"agents": [{"name": one.pop("id"), **one} for one in found]}

    def schedule(self, name: str, to: str, **fields: Any) -> dict[str, Any]:
        found = self.hub.done("POST", f"/api/hub/schedules/{name}", {"recipient": to, **fields})
        return self._schedule(found)

    def unschedule(self, name: str) -> dict[str, Any]:
        if "removes_no_schedules" in self.faults:
            return {}
        return self._schedule(self.hub.done("POST", f"/api/hub/schedules/{name}/remove", {}))

    def schedules(self) -> dict[str, Any]:
        found = self.hub.done("GET", "/api/hub/schedules")["schedules"]
        return {"schedules": [self._schedule(one) for one in found]}

    def _schedule(self, found: dict[str, Any]) -> dict[str, Any]:
        return {"name": found["schedule"], "type": found["kind"], **found}

    def upload(self, content_base64: str, content_type: str) -> dict[str, Any]:
        content = base64.b64decode(content_base64)
        headers = {"Content-Type": content_type}
        found = self.hub.done("PUT", "/api/hub/blobs", content, headers=headers)
        return {name: found[name] for name in ("digest", "bytes", "content_type")}

    def blob(self, message_id: str) -> dict[str, Any]:
        message = self.leases[message_id][1]
        path = f"/api/hub/mailboxes/default/{message['recipient']}/messages/{message_id}/blob"
        content = self.hub.content(path)
        is_right = hashlib.sha256(content).hexdigest() == message["blob"]["digest"]
        if not is_right and "believes_any_blob" not in self.faults:
            raise Failed("failed", "damaged_blob")
        return {"content_base64": base64.b64encode(content).decode()}

    def job_open(self, **fields: Any) -> dict[str, Any]:
        hub = Hub(fields["hub"], fields["patience_s"], self.faults) if fields["via"] == "http" else None
        self.jobs[fields["job_id"]] = ReferenceJob(fields, hub, self.faults)
        return {}

    def job_publish(self, job_id: str, event: str, detail: str, data: Any) -> dict[str, Any]:
        return {"receipt": self.jobs[job_id].publish(event, detail, data)}

    def job_resend(self, job_id: str) -> dict[str, Any]:
        return {"count": self.jobs[job_id].resend()}

    def close(self) -> dict[str, Any]:
        return {}
