import assert from "node:assert/strict";
import { test } from "node:test";

import { errors } from "../trunkline_agent.js";

const PARENTS = {
  UsageError: "TrunklineError",
  NotFound: "TrunklineError",
  Refused: "TrunklineError",
  EventRejected: "Refused",
  MessageRejected: "Refused",
  RateLimited: "Refused",
  LeaseLost: "Refused",
  BackboneUnreachable: "TrunklineError",
  NoReply: "BackboneUnreachable",
  ReceiptMissing: "BackboneUnreachable",
  OutboxBusy: "TrunklineError",
};
const EXIT_CODES = { UsageError: 2, NotFound: 3, Refused: 4, BackboneUnreachable: 5, TrunklineError: 1 };

test("each error has its place in the tree, a reason, an advice and an exit code", () => {
  assert.deepEqual(Object.keys(errors).sort(), [...Object.keys(PARENTS), "TrunklineError"].sort());
  for (const [name, parent] of Object.entries(PARENTS)) {
    const receipt = { seq: 3, verdict: "rejected", reason: "bad_signature" };
    const error = new errors[name](name === "EventRejected" ? receipt : "text");
    assert.ok(error instanceof errors[parent] && error instanceof errors.TrunklineError && error instanceof Error);
    assert.equal(error.name, name);
    assert.match(error.reason, /^[a-z_]+$/);
    assert.ok(error.advice.length > 10);
    assert.equal(error.exitCode, EXIT_CODES[name] ?? EXIT_CODES[parent] ?? EXIT_CODES[PARENTS[parent]]);
  }
});

test("an error keeps the reason, the advice and the cause that it is given", () => {
  const cause = new Error("below");
  const error = new errors.RateLimited("text", { reason: "mailbox_full", advice: "drain it", cause, retryAfterS: 7 });
  assert.deepEqual([error.reason, error.advice, error.cause, error.retryAfterS], ["mailbox_full", "drain it", cause, 7]);
  const rejected = new errors.EventRejected({ seq: 3, verdict: "rejected", reason: "too_late" });
  assert.deepEqual([rejected.reason, rejected.message], ["too_late", "seq 3 was rejected: too_late"]);
  assert.equal(new errors.TrunklineError("text").cause, undefined);
});
