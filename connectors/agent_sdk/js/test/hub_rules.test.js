// The rules that both libraries follow: keys of what is sent within a handling, errors of refusals, and Retry-After.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { errorOf, retryAfterS } from "../lib/answer_errors.js";
import { decode } from "../lib/canonical_json.js";
import { Handling, inHandlings, sendKey, within } from "../lib/handling.js";
import { proxyOf } from "../lib/proxy.js";
import { errors } from "../trunkline_agent.js";

const vectors = JSON.parse(readFileSync(new URL("../../vectors/hub.json", import.meta.url)));

test("a handling makes the keys of the vectors", () => {
  for (const { message_id: id, attempt, calls } of vectors.derived_keys) {
    const handling = new Handling(id, attempt);
    for (const { name, call, what, body, own, key, may_stand: mayStand } of calls) {
      const made = {
        content: () => handling.contentKey(what, decode(body, { exact: true })),
        reply: () => handling.replyKey(),
        own: () => handling.ownKey(own),
      };
      assert.deepEqual(made[call](), { text: key, mayStand }, name);
    }
  }
});

test("each refusal of the vectors has its error and exit code", () => {
  for (const { status, reason, error, error_of_a_message: ofMessage, exit_code: exitCode } of vectors.refusals) {
    const body = Buffer.from(reason === null ? "<html>" : JSON.stringify({ reason, message: "so\nit is" }));
    for (const [isMessage, name] of [[false, error], [true, ofMessage]]) {
      const found = errorOf({ status, headers: {}, body }, { isMessage });
      assert.deepEqual([found.constructor, found.exitCode], [errors[name], exitCode], `${status} ${reason}`);
      assert.equal(found.reason, reason ?? errors[name].reason);
      // A terminal obeys control characters, and the text may quote another client's.
      assert.ok(reason === null || found.message.includes("so\ufffdit is"), found.message);
    }
  }
});

test("Retry-After is read in each form, in UTC", () => {
  const { now, waits } = vectors.retry_after;
  for (const { name, retry_after: given, date, wait_s: waitS } of waits) {
    const headers = { "retry-after": given, ...(date === null ? {} : { date }) };
    assert.equal(retryAfterS(headers, Date.parse(now)), waitS, name);
  }
  assert.equal(retryAfterS({}), null);
});

test("the environment names the proxy", () => {
  for (const { name, url, environment, proxy, authorization } of vectors.proxies) {
    if (proxy === "refused") {
      assert.throws(() => proxyOf(new URL(url), environment), (error) => {
        return error instanceof errors.UsageError && !error.message.includes("secret");
      });
      continue;
    }
    const found = proxyOf(new URL(url), environment);
    assert.deepEqual([found?.url ?? null, found?.authorization ?? null], [proxy, authorization], name);
  }
});

const keyNow = () => sendKey("message", { n: 1 }).text;

async function* given(...ids) {
  for (const id of ids) yield { id, handling: new Handling(id, 1) };
}

test("the key of what is sent follows from the message in whose handling the code runs, and from no other", async () => {
  assert.throws(() => sendKey("message", {}, "not a key"), errors.UsageError);
  assert.match(keyNow(), /^[0-9a-f-]{36}$/);
  const late = [];
  for await (const { id } of inHandlings(given("m-1", "m-2"))) {
    assert.ok(keyNow().startsWith(`${id}/`));
    late.push(new Promise((resolve) => setTimeout(() => resolve(keyNow()), 5)));
    const inner = await within(new Handling("inner", 1), async () => {
      await null;
      return keyNow();
    });
    assert.ok(inner.startsWith("inner/"));
    for await (const other of inHandlings(given("other"))) assert.ok(keyNow().startsWith(`${other.id}/`));
    assert.ok(keyNow().startsWith(`${id}/`));
  }
  assert.match(keyNow(), /^[0-9a-f-]{36}$/);
  // The first round goes on while the second one runs, and keeps its message.
  assert.deepEqual((await Promise.all(late)).map((key) => key.slice(0, 4)), ["m-1/", "m-2/"]);
  for await (const { id } of inHandlings(given("m-3"))) {
    if (id) break;
  }
  assert.match(keyNow(), /^[0-9a-f-]{36}$/);
});
