// Jobs from registration to end, over HTTP and, if the package `mqtt` is there, over MQTT.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, test } from "node:test";
import { inspect } from "node:util";

import { Credentials, Delegator, errors, Float, HubAccess, Job } from "trunkline-agent";

const { HUB_URL, DELEGATOR_TOKEN, MQTT_PORT, MQTT_TOPICS } = process.env;
const credentials = new Credentials({ name: "planner", hub: { url: HUB_URL, token: DELEGATOR_TOKEN } });
const delegator = new Delegator(credentials);
after(() => delegator.close());

async function watched(jobId, options = {}) {
  const found = [];
  for await (const event of delegator.watch(jobId, { totalTimeoutS: 30, ...options })) found.push(event);
  return found;
}

test("a job over HTTP runs to its end, and its delegator sees each event", async () => {
  const submitted = await delegator.submit({ description: "build the docs" });
  assert.ok(!inspect(submitted).includes(submitted.secret));
  const all = watched(submitted.jobId);
  const job = Job.fromEnvironment({ hub: credentials, stateDir: "http-state" }, submitted.environment());
  const result = await job.run(async () => {
    const receipt = await job.started("build begins");
    assert.deepEqual([receipt.seq, receipt.verdict, receipt.reason], [1, "accepted", null]);
    // Calls that are made at once are numbered in their order.
    const both = [job.progress("größer 𝄞 1/2", { done: new Float(1) }), job.progress("", { big: 2n ** 62n, tiny: 1e-7 })];
    assert.deepEqual((await Promise.all(both)).map(({ seq }) => seq), [2, 3]);
    await job.permissionRequired("may I push?");
    return "done";
  });
  assert.equal(result, "done");
  await assert.rejects(job.progress("too late"), errors.UsageError);
  await job.close();
  const events = await all;
  assert.deepEqual(
    events.map(({ event, seq, status }) => [event, seq, status]),
    [
      ["started", 1, "running"],
      ["progress", 2, "running"],
      ["progress", 3, "running"],
      ["permission_required", 4, "running"],
      ["completed", 5, "completed"],
    ],
  );
  assert.deepEqual(events[2].data, { big: 2n ** 62n, tiny: 1e-7 });
  // A job that has ended gives its end.
  const [end, ...rest] = await watched(submitted.jobId);
  assert.deepEqual([end.event, end.seq, end.status, end.fromSnapshot, rest.length], ["completed", 5, "completed", true, 0]);
});

test("a job whose work throws ends with the type of the exception, and nothing else of it", async () => {
  const { jobId, secret } = await delegator.submit({ description: "fails" });
  const job = new Job(jobId, secret, { hub: credentials, stateDir: "http-state" });
  const work = job.run(() => {
    throw new RangeError(`the secret is ${secret}`);
  });
  await assert.rejects(work, RangeError);
  const [end] = await watched(jobId);
  assert.deepEqual([end.event, end.detail, end.status], ["error", "RangeError", "error"]);
});

test("an event that could not be sent stays in the outbox, and is sent first", async () => {
  const { jobId, secret } = await delegator.submit({ description: "begins without a gateway" });
  const nowhere = new HubAccess("http://127.0.0.1:9", DELEGATOR_TOKEN);
  const options = { stateDir: "http-state", patienceS: 0.3 };
  await assert.rejects(new Job(jobId, secret, { hub: nowhere, ...options }).started("begins"), errors.BackboneUnreachable);
  const kept = JSON.parse(await readFile(`http-state/${jobId}.json`, "utf8"));
  assert.deepEqual(kept.outbox.map(({ seq, event }) => [seq, event]), [[1, "started"]]);
  const job = new Job(jobId, secret, { hub: credentials, ...options });
  assert.equal(await job.resend(), 1);
  assert.equal(await job.resend(), 0);
  assert.equal((await job.progress("goes on")).seq, 2);
  await job.completed();
});

test("a rejected event is reported with its reason, and does not block those behind it", async () => {
  const { jobId, secret } = await delegator.submit({ description: "is cancelled" });
  const forger = new Job(jobId, "another-secret", { hub: credentials, stateDir: "forger" });
  const error = await forger.started().then(assert.fail, (found) => found);
  assert.ok(error instanceof errors.EventRejected && error instanceof errors.Refused);
  assert.deepEqual([error.reason, error.receipt.verdict, error.receipt.seq], ["bad_signature", "rejected", 1]);
  const job = new Job(jobId, secret, { hub: credentials, stateDir: "http-state" });
  await job.started();
  const all = watched(jobId);
  assert.equal(await delegator.cancel(jobId, { reason: "no longer needed" }), "cancelled");
  const { event, detail, isEnd } = (await all).at(-1);
  assert.deepEqual([event, detail, isEnd], ["cancelled", "no longer needed", true]);
  await assert.rejects(job.progress(), { name: "EventRejected", reason: "after_terminal" });
});

test("a watch ends by either of its timers, and for an unknown job", async () => {
  const { jobId } = await delegator.submit({ description: "waits" });
  await assert.rejects(watched(jobId, { idleTimeoutS: 0.2 }), { name: "NoReply", reason: "idle_timeout" });
  await assert.rejects(watched(jobId, { totalTimeoutS: 0.2 }), { name: "NoReply", reason: "total_timeout" });
  await assert.rejects(watched("00000000"), errors.NotFound);
  await delegator.cancel(jobId);
});

if (MQTT_PORT !== undefined) {
  test("a job over MQTT gets a receipt with a verdict for each event, to its end", async () => {
    const { jobId, secret } = await delegator.submit({ description: "over MQTT" });
    const mqtt = { port: Number(MQTT_PORT), topicPrefix: MQTT_TOPICS };
    const job = new Job(jobId, secret, { mqtt, stateDir: "mqtt-state" });
    const all = watched(jobId);
    const receipt = await job.started("begins");
    assert.deepEqual([receipt.seq, receipt.verdict], [1, "accepted"]);
    assert.equal(typeof receipt.position.offset, "number");
    await job.progress("1.0 is a float", { one: new Float(1) });
    await job.completed("done");
    assert.deepEqual((await all).map(({ event }) => event), ["started", "progress", "completed"]);
    const late = new Job(jobId, secret, { mqtt, stateDir: "mqtt-late" });
    await assert.rejects(late.progress("late"), { name: "EventRejected", reason: "seq_conflict" });
  });

  test("a broker that is away is reported, and the event stays in the outbox", async () => {
    const { jobId, secret } = await delegator.submit({ description: "no broker" });
    const mqtt = { port: 9, topicPrefix: MQTT_TOPICS, attempts: 1, connectS: 1 };
    const job = new Job(jobId, secret, { mqtt, stateDir: "mqtt-state" });
    await assert.rejects(job.started(), errors.BackboneUnreachable);
    const over = new Job(jobId, secret, { hub: credentials, stateDir: "mqtt-state" });
    assert.equal(await over.resend(), 1);
    await over.completed();
  });
} else {
  test("without the package mqtt a job over MQTT says what to install", async () => {
    const { jobId, secret } = await delegator.submit({ description: "no package" });
    const job = new Job(jobId, secret, { mqtt: {}, stateDir: "mqtt-state" });
    await assert.rejects(job.started(), (error) => error instanceof errors.UsageError && /npm install mqtt/.test(error.advice));
  });
}
