// Requests against a server of the test, whose answers a real gateway gives only when something is broken.

import assert from "node:assert/strict";
import { once } from "node:events";
import { mkdtempSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { Agent, Credentials, Delegator, errors, Job } from "../trunkline_agent.js";

const SENT = { delivered: true, message_id: "m-1" };
const CUT = Symbol("cut the connection");

// A server that gives these answers, one after the other; the last one again and again.
async function serving(t, ...answers) {
  const requests = [];
  const server = createServer(async (request, response) => {
    let body = "";
    for await (const part of request) body += part;
    requests.push({ method: request.method, url: request.url, headers: request.headers, body });
    const answer = answers[Math.min(requests.length, answers.length) - 1];
    if (answer === CUT) return request.socket.destroy();
    const { status = 200, headers = {}, json, text } = typeof answer === "function" ? answer(requests.at(-1)) : answer;
    response.writeHead(status, { "Content-Type": "application/json", ...headers });
    if (text === undefined) return response.end(JSON.stringify(json));
    // In two parts, and then the connection is lost.
    response.write(text.slice(0, text.length / 2));
    await sleep(30);
    return response.write(text.slice(text.length / 2), () => response.destroy());
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  const url = `http://127.0.0.1:${server.address().port}`;
  const credentials = new Credentials({ name: "ann", hub: { url, token: "canary-token" } });
  const agent = new Agent("ann", credentials, { patienceS: 1.5 });
  t.after(async () => {
    await agent.close();
    server.closeAllConnections();
    server.close();
  });
  return { agent, credentials, requests, url };
}

test("a gateway that stays away is unreachable in the end, and the error says which one", async (t) => {
  const { agent, requests, url } = await serving(t, CUT);
  const error = await agent.send("bo", "note").then(assert.fail, (found) => found);
  assert.ok(error instanceof errors.BackboneUnreachable);
  assert.ok(error.message.includes(url) && !error.message.includes("canary-token"));
  // Pauses of at most 0.2, 0.4 and 0.8 s, and no fourth one of at least 0.8 s within 1.5 s.
  assert.equal(requests.length, 4);
});

test("a limit whose wait is longer than the patience is reported at once, with its time", async (t) => {
  const busy = { status: 429, headers: { "Retry-After": "60" }, json: { reason: "mailbox_full", message: "full" } };
  const { agent, requests } = await serving(t, busy);
  const error = await agent.send("bo", "note").then(assert.fail, (found) => found);
  assert.ok(error instanceof errors.RateLimited);
  assert.deepEqual([error.reason, error.retryAfterS, requests.length], ["mailbox_full", 60, 1]);
});

test("a server that is no gateway is reported as such", async (t) => {
  const { agent } = await serving(t, { text: "<html>" , headers: { "Content-Length": "6" } });
  await assert.rejects(agent.send("bo", "note"), { name: "TrunklineError", reason: "not_a_gateway" });
});

test("the credentials of another agent, and numbers that no request can have, are usage errors", async (t) => {
  const { agent, credentials, requests } = await serving(t, { json: SENT });
  assert.throws(() => new Agent("bo", credentials), errors.UsageError);
  for (const options of [{ leaseS: 0 }, { leaseS: 86_401 }, { leaseS: NaN }, { waitS: -1 }, { longestS: "1" }]) {
    await assert.rejects(agent.receive(options), errors.UsageError, JSON.stringify(options));
  }
  for (const limit of [0, 1001]) await assert.rejects(agent.messages({ limit }).next(), errors.UsageError);
  assert.deepEqual(requests, []);
});

test("an agent that closes gives back what it received and nothing handles", async (t) => {
  const message = (id) => ({ id, timestamp: "2026-01-01T00:00:00Z", sender: "bo", recipient: "ann", type: "note", payload: 1 });
  let handed = 0;
  const answers = ({ method }) => {
    if (method === "POST") return { json: { done: [], refused: [] } };
    handed += 1;
    return { json: { lease_id: `l-${handed}`, messages: [message(`m-${handed}`)] } };
  };
  const { agent, requests } = await serving(t, answers);
  const [settled, handled, left] = [await agent.receive(), await agent.receive(), await agent.receive()];
  await settled.ack();
  let end;
  const done = handled.handle(() => new Promise((resolve) => (end = resolve)));
  await agent.close();
  const nacks = requests.filter(({ url }) => url.endsWith("/nack")).map(({ body }) => JSON.parse(body));
  assert.deepEqual(nacks.map(({ message_ids: ids }) => ids), [["m-3"]]);
  assert.match(nacks[0].reason, /the agent ended/);
  assert.equal(left.state, "given back");
  end();
  await done;
  assert.equal(handled.state, "acknowledged");
});

test("a signal ends a request and a pause at once", async (t) => {
  const { agent } = await serving(t, { status: 503, headers: { "Retry-After": "1" }, json: {} });
  const begin = performance.now();
  const reason = new Error("enough");
  await assert.rejects(agent.send("bo", "note", {}, { signal: AbortSignal.abort(reason) }), reason);
  const stop = new AbortController();
  setTimeout(() => stop.abort(reason), 100);
  await assert.rejects(agent.send("bo", "note", {}, { signal: stop.signal }), reason);
  assert.ok(performance.now() - begin < 900);
});

test("a stream goes on after the last event when its connection is lost, and pieces of events are joined", async (t) => {
  const event = (seq, status, ending = "\n") => {
    const data = { type: "job.event", verdict: "accepted", seq, status_after: status, position: [0, seq], body: { event: "progress", detail: "é", data: {} } };
    return [`event: settled`, `id: b-${seq}`, `data: ${JSON.stringify(data)}`, "", ""].join(ending);
  };
  const first = { text: `: ping\n\nevent: snapshot\nid: b-0\ndata: {"row":\ndata: null}\n\n${event(1, "running", "\r\n")}event: settled\nid: b-9\ndata: {"cut` };
  const { credentials, requests } = await serving(t, first, CUT, { text: event(2, "running") + `${event(3, "completed", "\r")}: ping\n` });
  const delegator = new Delegator(credentials, { patienceS: 3 });
  t.after(() => delegator.close());
  const found = [];
  for await (const { seq, isEnd } of delegator.watch("0a1b2c3d")) found.push([seq, isEnd]);
  assert.deepEqual(found, [[1, false], [2, false], [3, true]]);
  assert.deepEqual(requests.map(({ headers }) => headers["last-event-id"]), [undefined, "b-1", "b-1"]);
});

test("an event of a job without an answer is sent again with the same bytes; one that is too large is not", async (t) => {
  const told = { ce_id: "c-1", seq: 1, verdict: "accepted", reason: null, position: [0, 7], status: "running" };
  const large = { status: 413, json: { reason: "too_large", message: "too large" } };
  const { credentials, requests } = await serving(t, CUT, { status: 502, json: {} }, { json: told }, large);
  const job = new Job("0a1b2c3d", "secret", { hub: credentials, stateDir: mkdtempSync(join(tmpdir(), "job-")), patienceS: 3 });
  const receipt = await job.started("begins");
  assert.deepEqual(receipt, { ceId: "c-1", seq: 1, verdict: "accepted", reason: null, position: { partition: 0, offset: 7 } });
  assert.equal(new Set(requests.map(({ body }) => body)).size, 1);
  await assert.rejects(job.progress(), { name: "EventRejected", reason: "too_large" });
  assert.equal(await job.resend(), 0);
});

test("a handler that throws sends the type of its error, and no text of it", async (t) => {
  class LoginFailed extends Error {}
  const secret = "sk-live-hunter2";
  const named = Object.assign(new Error(secret), { name: secret });
  const message = { id: "m-1", timestamp: "2026-01-01T00:00:00Z", sender: "bo", recipient: "ann", type: "note", payload: 1 };
  for (const [thrown, reason] of [[new LoginFailed(secret), "LoginFailed"], [named, "Error"], [secret, "String"], [null, "Error"]]) {
    const { agent, requests } = await serving(t, { json: { lease_id: "l-1", messages: [message] } }, { json: { done: ["m-1"], refused: [] } });
    const { value } = await agent.messages().next();
    await value.handle(() => Promise.reject(thrown)).then(assert.fail, (error) => assert.equal(error, thrown));
    assert.equal(JSON.parse(requests.at(-1).body).reason, reason);
    assert.ok(!JSON.stringify(requests).includes(secret));
  }
});

test("a status is a message to the hub, and agents are found by a capability and a status, to the end of the list", async (t) => {
  const row = (id) => ({ id, status: "stopped", task: "is found", capabilities: ["dig"], started_at: "2026-01-01T00:00:00Z" });
  const { agent, requests } = await serving(t, { json: SENT }, { json: { participants: [row("ann")], left: 1 } }, { json: { participants: [row("bo")], left: 0 } });
  await agent.status("working", "step 3");
  assert.deepEqual([requests[0].method, requests[0].url], ["POST", "/api/hub/messages"]);
  assert.deepEqual(JSON.parse(requests[0].body), { recipient: "hub", type: "status", payload: { status: "working", text: "step 3" } });
  const found = await agent.discover({ capability: "dig", status: "stopped" });
  assert.deepEqual(found.map(({ name }) => name), ["ann", "bo"]);
  const asked = requests.slice(1).map(({ url }) => new URL(url, "http://hub"));
  assert.deepEqual(asked.map(({ pathname }) => pathname), Array(2).fill("/api/hub/participants"));
  assert.deepEqual(asked.map(({ searchParams }) => Object.fromEntries(searchParams)), [
    { capability: "dig", status: "stopped" },
    { capability: "dig", status: "stopped", after: "ann" },
  ]);
});

test("a job that a handling submits has a key of its message, the same as in Python", async (t) => {
  const message = { id: "m-1", timestamp: "2026-01-01T00:00:00Z", sender: "bo", recipient: "ann", type: "note", payload: 1 };
  const job = { job_id: "0a1b2c3d", secret: "s", position: [0, 1] };
  const { agent, credentials, requests } = await serving(t, { json: { lease_id: "l-1", messages: [message] } }, { json: job }, { json: job }, { json: { done: ["m-1"], refused: [] } });
  const delegator = new Delegator(credentials);
  const { value } = await agent.messages().next();
  await value.handle(async () => {
    await delegator.submit({ description: "dig", notify: ["end"], broker: { password: "s3cret" } });
    await delegator.submit({ description: "dig", key: "mine" });
  });
  await delegator.close();
  const keys = requests.slice(1, 3).map(({ headers }) => headers["idempotency-key"]);
  assert.deepEqual(keys, ["m-1/1f7339d4727b9ad4f2db733f9c3daf04/1", "mine"]);
});

test("a list goes on after its last row until none is left, and its rows have fields of their own", async (t) => {
  const fields = { status: "idle", task: "", capabilities: ["sum"], started_at: "2026-01-31T12:00:00.250Z" };
  const part = (left, ...names) => ({ json: { participants: names.map((id) => ({ id, ...fields })), left } });
  const { agent, requests } = await serving(t, part(1, "ann", "bo"), part(0, "cy"));
  const found = await agent.discover({ capability: "sum" });
  assert.deepEqual(found.map((one) => one.name), ["ann", "bo", "cy"]);
  assert.deepEqual(found[0].startedAt, new Date(fields.started_at));
  assert.deepEqual(
    requests.map((one) => one.url),
    ["/api/hub/participants?capability=sum", "/api/hub/participants?capability=sum&after=bo"],
  );
});

test("a change has the caller's key, and the names in its path are quoted", async (t) => {
  const fields = { schedule: "s/1", recipient: "bo", kind: "note", cron: null, every_s: 60, status: "removed" };
  const { agent, requests } = await serving(t, { json: { ...fields, next_run_at: null, runs: 3 } });
  const found = await agent.unschedule("s/1", { key: "k-1" });
  assert.deepEqual([found.name, found.type, found.everyS, found.nextRunAt], ["s/1", "note", 60, null]);
  assert.equal(requests[0].url, "/api/hub/schedules/s%2F1/remove");
  assert.equal(requests[0].headers["idempotency-key"], "k-1");
});
