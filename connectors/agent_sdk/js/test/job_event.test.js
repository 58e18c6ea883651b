import assert from "node:assert/strict";
import { test } from "node:test";

import { HubAccess, Job, UsageError } from "../trunkline_agent.js";
import { eventBody, isSameEvent, safeDetail, signedEvent } from "../lib/job_event.js";

const SECRET = "canary-5d1c0e77";
const body = (event, detail = "", data = {}) => eventBody("0a1b2c3d", event, detail, data, SECRET);

test("an event has the fields of the specification, and its time in UTC", () => {
  const found = body("progress", "größer 𝄞", { n: 1, skipped: undefined });
  const { timestamp, ...rest } = found;
  assert.match(timestamp, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
  assert.deepEqual(rest, { schema_version: 1, job_id: "0a1b2c3d", event: "progress", detail: "größer 𝄞", data: { n: 1 } });
  assert.equal(body("started", "\u{1d11e}".repeat(500)).detail.length, 1000);
});

test("an event that the backbone would reject or mask is not sent, and the error has no secret", () => {
  const bad = [
    ["begun"], ["started", 7], ["started", "x".repeat(501)], ["started", "a\nb"], ["started", "\u0085"],
    ["progress", "", []], ["progress", "", null], ["permission_required", " "], ["progress", "", { auth_token: "x" }],
    ["progress", "", { hmac_sig: "x" }], ["progress", "wrote /home/ann/x"], ["progress", `the key ${SECRET}`],
    ["progress", "", { deep: [SECRET] }], ["progress", "", { n: NaN }], ["progress", "", { n: 2n ** 63n }],
  ];
  for (const [event, detail, data] of bad) {
    assert.throws(() => body(event, detail, data), (error) => error instanceof UsageError && !error.message.includes(SECRET), String(detail));
  }
  assert.throws(() => signedEvent(body("progress", "", { x: "y".repeat(1000) }), 1, SECRET, 1000), { reason: "too_large" });
});

test("an event is compared by its kind, detail and data, not by its time", () => {
  const [one, other] = [body("completed", "done", { a: 1, b: [2] }), body("completed", "done", { b: [2], a: 1 })];
  const sent = { ...one, timestamp: "2026-01-01T00:00:00Z", seq: 4, data: { ...one.data, hmac_sig: "x" } };
  assert.equal(isSameEvent(sent, other), true);
  assert.equal(isSameEvent(sent, body("completed", "done", { a: 1 })), false);
});

test("a text of others becomes a safe detail", () => {
  assert.equal(safeDetail("a\nb\u0007"), "a b ");
  assert.equal(safeDetail("cannot open /etc/passwd"), "[masked]");
  assert.equal([...safeDetail("😀".repeat(600))].length, 500);
});

test("a job needs an id, a secret and one door", () => {
  const hub = new HubAccess("http://127.0.0.1:9", "token");
  for (const call of [["x", SECRET, { hub }], ["0a1b2c3d", "", { hub }], ["0a1b2c3d", SECRET, {}], ["0a1b2c3d", SECRET, { hub, mqtt: {} }]]) {
    assert.throws(() => new Job(...call), UsageError);
  }
});
