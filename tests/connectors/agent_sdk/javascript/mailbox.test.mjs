// Two agents, `ann` and `bo`, at a real gateway. The environment has its address and their tokens.

import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { writeFile } from "node:fs/promises";
import { after, test } from "node:test";

import { Agent, Credentials, Delegator, errors, Float } from "trunkline-agent";

const { HUB_URL, ANN_TOKEN, BO_TOKEN } = process.env;
const credentials = (name, token) => new Credentials({ name, hub: { url: HUB_URL, token } });
const ann = new Agent("ann", credentials("ann", ANN_TOKEN));
const bo = new Agent(null, credentials("bo", BO_TOKEN));
after(() => Promise.all([ann.close(), bo.close()]));

// The next message, acknowledged.
async function next(agent, options = {}) {
  for await (const message of agent.messages({ waitS: 10, ...options })) {
    await message.ack();
    return message;
  }
  assert.fail("no message came");
}

const isEmpty = async (agent) => {
  for await (const message of agent.messages({ waitS: 0 })) assert.fail(`there is ${message.id}`);
};

test("a message is sent, leased and acknowledged when the loop goes on", async () => {
  const sent = await ann.send("bo", "build", { commit: "4d416e8" }, { priority: "high", thread: "t-1", subject: "a commit" });
  assert.equal(sent.delivered, true);
  assert.equal(sent.verdict, "accepted");
  assert.deepEqual(await bo.count(), { high: 1, normal: 0, low: 0, total: 1 });
  const seen = [];
  for await (const message of bo.messages({ waitS: 0.2 })) {
    seen.push(message);
    assert.equal(message.state, "open");
  }
  assert.deepEqual(
    seen.map(({ id, sender, type, payload, thread, subject, attempt, state }) => [id, sender, type, payload, thread, subject, attempt, state]),
    [[sent.messageId, "ann", "build", { commit: "4d416e8" }, "t-1", "a commit", 1, "acknowledged"]],
  );
  await isEmpty(bo);
});

test("the same key is the same message, and another content under it is rejected", async () => {
  const first = await ann.send("bo", "note", { n: 1 }, { key: "once" });
  const again = await ann.send("bo", "note", { n: 1 }, { key: "once" });
  assert.deepEqual([again.messageId, again.verdict], [first.messageId, "duplicate"]);
  await assert.rejects(ann.send("bo", "note", { n: 2 }, { key: "once" }), (error) => {
    assert.ok(error instanceof errors.MessageRejected);
    return error.reason === "seq_conflict";
  });
  assert.equal((await next(bo)).id, first.messageId);
  await isEmpty(bo);
});

test("a handler that throws gives the message back, and one that ends well acknowledges it", async () => {
  const { messageId } = await ann.send("bo", "ask", {});
  const attempts = [];
  for await (const message of bo.messages({ waitS: 0.2 })) {
    attempts.push(message.attempt);
    const work = message.handle(async () => {
      if (message.attempt === 1) throw new TypeError("no disk\nspace");
      return 42;
    });
    if (message.attempt === 1) await assert.rejects(work, TypeError);
    else assert.equal(await work, 42);
    assert.equal(message.id, messageId);
  }
  assert.deepEqual(attempts, [1, 2]);
  await isEmpty(bo);
});

test("a loop that ends by a break gives its message back, and those that it has not seen", async () => {
  for (const n of [1, 2, 3]) await ann.send("bo", "note", n);
  for await (const message of bo.messages({ limit: 3, waitS: 5 })) {
    assert.equal(message.payload, 1);
    break;
  }
  const seen = [];
  for await (const message of bo.messages({ limit: 3, waitS: 0.2 })) seen.push([message.payload, message.attempt]);
  assert.deepEqual(seen, [[1, 2], [2, 2], [3, 2]]);
});

test("a lease is extended while a handler runs, and no longer once it hangs", async () => {
  await ann.send("bo", "slow", {});
  let handed = 0;
  for await (const message of bo.messages({ leaseS: 1, waitS: 0.2 })) {
    handed += 1;
    await message.handle(() => new Promise((resolve) => setTimeout(resolve, 2500)));
  }
  assert.equal(handed, 1);
  await ann.send("bo", "hangs", {});
  const seen = [];
  for await (const message of bo.messages({ leaseS: 60, longestS: 0.5, waitS: 10 })) {
    seen.push(message);
    const told = new Promise((resolve) => message.signal.addEventListener("abort", resolve, { once: true }));
    await Promise.race([told, new Promise((_, reject) => setTimeout(reject, 10_000, new Error("not told")))]);
    assert.match(message.signal.reason.message, /longer than 0.5 s/);
    assert.equal((await next(bo)).id, message.id);
    await assert.rejects(message.ack(), errors.LeaseLost);
    assert.equal(message.signal.aborted, true);
    break;
  }
  assert.equal(seen[0].state, "lost");
  await isEmpty(bo);
});

test("each message of a loop has its own time", async () => {
  for (const n of [1, 2, 3]) await ann.send("bo", "slow", n);
  for await (const message of bo.messages({ limit: 3, leaseS: 1, longestS: 2, waitS: 0.2 })) {
    assert.equal(message.attempt, 1);
    await message.handle(() => new Promise((resolve) => setTimeout(resolve, 1200)));
  }
  await isEmpty(bo);
});

test("a question gets its reply, once, also when it is handed out again", async () => {
  const asked = ann.ask("bo", "ask", [6, 7], { timeoutS: 20, thread: "t-2" });
  let attempts = 0;
  for await (const message of bo.messages({ waitS: 10 })) {
    attempts += 1;
    assert.deepEqual(message.payload, [6, 7]);
    const replied = await message.reply(41 + attempts);
    if (attempts === 1) {
      await message.nack("once more");
      continue;
    }
    assert.equal(replied.verdict, "duplicate");
    await message.ack();
    break;
  }
  const reply = await asked;
  assert.deepEqual([reply.payload, reply.sender, reply.type, reply.thread], [42, "bo", "answer", "t-2"]);
  await isEmpty(ann);
});

test("a question without a reply in time fails with NoReply and the id of the message", async () => {
  const asked = ann.ask("bo", "ask", "is anybody there?", { timeoutS: 0.3 });
  const error = await asked.then(assert.fail, (found) => found);
  assert.ok(error instanceof errors.NoReply && error instanceof errors.BackboneUnreachable);
  const message = await next(bo);
  assert.equal(message.id, error.messageId);
  await message.reply("late");
  assert.equal((await next(ann)).inReplyTo, error.messageId);
});

test("a topic's subscribers get what is published to it", async () => {
  await assert.rejects(ann.publish("js-builds", "built", {}), errors.NotFound);
  await bo.subscribe("js-builds");
  const published = await ann.publish("js-builds", "built", { green: true });
  assert.equal(published.recipients, 1);
  const message = await next(bo);
  assert.deepEqual([message.topic, message.type, message.payload], ["js-builds", "built", { green: true }]);
  await bo.unsubscribe("js-builds");
  assert.equal((await ann.publish("js-builds", "built", {})).recipients, 0);
});

test("a schedule posts messages until it is removed", async () => {
  const shown = await ann.schedule("js-tick", "bo", "tick", { n: 1 }, { everyS: 1 });
  assert.deepEqual([shown.name, shown.type, shown.everyS, shown.status], ["js-tick", "tick", 1, "active"]);
  assert.deepEqual((await next(bo)).payload, { n: 1 });
  await ann.unschedule("js-tick");
  await assert.rejects(ann.unschedule("js-tick"), errors.Refused);
  for await (const message of bo.messages({ waitS: 0 })) assert.equal(message.type, "tick");
});

test("a blob goes from a file to the recipient, whole", async () => {
  const content = randomBytes(300_000);
  await writeFile("content.bin", content);
  const blob = await ann.upload("content.bin", { contentType: "image/png" });
  assert.deepEqual([blob.bytes, blob.contentType], [content.length, "image/png"]);
  assert.equal((await ann.upload(content)).digest, blob.digest);
  await ann.send("bo", "report", {}, { blob });
  const message = await next(bo);
  assert.deepEqual(message.blobInfo, { digest: blob.digest, bytes: content.length, contentType: "image/png" });
  assert.ok((await message.blob()).equals(content));
});

test("numbers arrive as they were sent: 64-bit integers, floats and text beyond the basic plane", async () => {
  const payload = { big: 2n ** 63n - 1n, small: -(2n ** 63n), safe: 2 ** 53 - 1, half: 0.5, one: new Float(1), text: "\u{1f600}\u2028" };
  await ann.send("bo", "numbers", payload);
  const found = (await next(bo)).payload;
  assert.deepEqual(found, { ...payload, one: 1 });
});

test("a wait ends by a signal with its reason, and by close quietly", async () => {
  const stop = new AbortController();
  setTimeout(() => stop.abort(new Error("enough")), 100);
  const waits = async () => {
    for await (const message of bo.messages({ signal: stop.signal })) assert.fail(message.id);
  };
  await assert.rejects(waits(), /enough/);
  const other = new Agent("bo", credentials("bo", BO_TOKEN));
  setTimeout(() => other.close(), 100);
  for await (const message of other.messages()) assert.fail(message.id);
});

test("refusals have a class, a reason and an advice, and show no token", async () => {
  const stranger = new Agent("bo", credentials("bo", "not-a-token"));
  const cases = [
    [() => ann.send("nobody-there", "note", {}), errors.NotFound, "unknown_recipient"],
    [() => ann.send("bo", "note", {}, { priority: "urgent" }), errors.UsageError, "malformed"],
    [() => ann.send("bo", "note", { now: NaN }), errors.UsageError, "usage"],
    [() => stranger.send("bo", "note", {}), errors.Refused, "unauthorized"],
    [() => new Delegator(credentials("bo", BO_TOKEN)).submit({ description: "x" }), errors.Refused, "policy"],
  ];
  for (const [call, kind, reason] of cases) {
    const error = await call().then(assert.fail, (found) => found);
    assert.ok(error instanceof kind, error.stack);
    assert.equal(error.reason, reason);
    assert.ok(error.advice.length > 5);
    assert.ok(!`${error.stack}${JSON.stringify(error)}`.includes("not-a-token"));
  }
});
