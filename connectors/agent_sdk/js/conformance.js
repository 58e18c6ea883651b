// The adapter of this library for `./trunkline conformance -- node conformance.js`. The protocol is described in
// docs/reference/conformance_protocol.md. An argument names the package to check instead of the one beside this file.

import { AsyncResource } from "node:async_hooks";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const {
  Agent,
  BackboneUnreachable,
  canonicalBytes,
  Credentials,
  decode,
  EventRejected,
  HubAccess,
  Job,
  LeaseLost,
  MalformedJsonError,
  NoReply,
  NotFound,
  OutboxBusy,
  RateLimited,
  Refused,
  signEventText,
  UsageError,
} = await import(process.argv[2] ?? "./trunkline_agent.js");

const FEATURES = ["canonical", "signing", "hub", "extend", "keeps_leases", "ends_long_handlings", "ask", "topics", "handlings"];
FEATURES.push("discovery", "schedules", "blobs", "job_http");
// The kind of an error by its class; a class comes before those that it is below.
const KINDS = [
  [MalformedJsonError, "malformed"],
  [NoReply, "no_reply"],
  [LeaseLost, "lease_lost"],
  [RateLimited, "rate_limited"],
  [EventRejected, "rejected"],
  [OutboxBusy, "outbox_busy"],
  [NotFound, "not_found"],
  [UsageError, "usage"],
  [BackboneUnreachable, "unreachable"],
  [Refused, "refused"],
];

const messages = new Map();
// By the message's id, a function that runs another one within the handling of the message.
const handlings = new Map();
const jobs = new Map();
let agent = null;

const operations = {
  async hello() {
    const { name, version } = JSON.parse(readFileSync(new URL("package.json", import.meta.url)));
    const features = (await hasMqtt()) ? [...FEATURES, "job_mqtt"] : FEATURES;
    return { protocol: 1, name: name ?? "trunkline-agent", version: version ?? "", features };
  },

  async canonical({ json_base64: json }) {
    const written = canonicalBytes(decode(Buffer.from(json, "base64"), { exact: true }));
    return { canonical_base64: Buffer.from(written).toString("base64") };
  },

  async sign_event({ json_base64: json, secret }) {
    const signed = signEventText(Buffer.from(json, "base64"), secret);
    return { hmac_sig: decode(signed).data.hmac_sig };
  },

  async open({ name, hub, patience_s: patienceS }) {
    agent = new Agent(null, new Credentials({ name, hub: new HubAccess(hub.url, hub.token) }), { patienceS });
    return {};
  },

  async send({ to, type, while_handling: handled, blob, ...given }) {
    const content = "payload" in given ? [given.payload, { blob }] : [];
    const round = handled === undefined ? (work) => work() : handlingOf(handled);
    const { messageId } = await round(() => agent.send(to, type, ...content));
    return { message_id: messageId };
  },

  async lease({ wait_s: waitS, lease_s: leaseS, longest_s: longestS = Infinity }) {
    const message = await agent.receive({ leaseS, longestS, waitS });
    if (message === null) return { message: null };
    messages.set(message.id, message);
    return { message: shown(message) };
  },

  async ack({ message_id: id }) {
    await messages.get(id).ack();
    return {};
  },

  async nack({ message_id: id, error }) {
    await messages.get(id).nack(error);
    return {};
  },

  async fail({ message_id: id, text }) {
    const error = new Error(text);
    await messages.get(id).handle(() => Promise.reject(error)).catch((found) => {
      if (found !== error) throw found;
    });
    return {};
  },

  async extend({ message_id: id, lease_s: leaseS }) {
    await messages.get(id).extend(leaseS);
    return {};
  },

  async reply({ message_id: id, type, payload }) {
    const { messageId } = await messages.get(id).reply(payload, { type });
    return { message_id: messageId };
  },

  async ask({ to, type, payload, wait_s: timeoutS }) {
    return { reply: shown(await agent.ask(to, type, payload, { timeoutS })) };
  },

  async publish({ topic, type, payload }) {
    const { messageId } = await agent.publish(topic, type, payload);
    return { message_id: messageId };
  },

  async subscribe({ topic }) {
    await agent.subscribe(topic);
    return {};
  },

  async unsubscribe({ topic }) {
    await agent.unsubscribe(topic);
    return {};
  },

  async status({ state, text }) {
    const { messageId } = await agent.status(state, text);
    return { message_id: messageId };
  },

  async discover({ capability, status }) {
    const found = await agent.discover({ capability, status });
    return { agents: found.map(({ startedAt: _startedAt, ...fields }) => fields) };
  },

  async schedule({ name, to, type, payload, every_s: everyS }) {
    return shownSchedule(await agent.schedule(name, to, type, payload, { everyS }));
  },

  async unschedule({ name }) {
    return shownSchedule(await agent.unschedule(name));
  },

  async schedules() {
    return { schedules: (await agent.schedules()).map(shownSchedule) };
  },

  async upload({ content_base64: content, content_type: contentType }) {
    const { digest, bytes, contentType: type } = await agent.upload(Buffer.from(content, "base64"), { contentType });
    return { digest, bytes, content_type: type };
  },

  async blob({ message_id: id }) {
    return { content_base64: (await messages.get(id).blob()).toString("base64") };
  },

  async job_open({ job_id: id, secret, state_dir: stateDir, via, hub, mqtt, ...times }) {
    const { patience_s: patienceS, receipt_timeout_s: receiptS } = times;
    const broker = () => ({ host: mqtt.host, port: mqtt.port, tls: mqtt.tls, topicPrefix: mqtt.prefix, receiptS });
    const door = via === "http" ? { hub: new HubAccess(hub.url, hub.token) } : { mqtt: broker() };
    jobs.set(id, new Job(id, secret, { ...door, stateDir, patienceS }));
    return {};
  },

  async job_publish({ job_id: id, event, detail, data }) {
    const { ceId, seq, verdict, reason, position } = await jobs.get(id).publish(event, detail, data);
    return { receipt: { ce_id: ceId, seq, verdict, reason, position } };
  },

  async job_resend({ job_id: id }) {
    return { count: await jobs.get(id).resend() };
  },

  async close() {
    await Promise.all([...jobs.values()].map((job) => job.close()));
    await agent?.close();
    return {};
  },
};

async function hasMqtt() {
  try {
    await import("mqtt");
    return true;
  } catch {
    return false;
  }
}

function handlingOf(id) {
  if (!handlings.has(id)) {
    // A handler that never ends: the kit settles the message, or kills this process.
    messages.get(id).handle(() => new Promise(() => handlings.set(id, AsyncResource.bind((work) => work()))));
  }
  return handlings.get(id);
}

function shownSchedule({ everyS: every_s, nextRunAt: next_run_at, ...fields }) {
  return { ...fields, every_s, next_run_at };
}

function shown(message) {
  const texts = Object.entries(message).filter(([, value]) => value === null || typeof value === "string");
  const named = texts.map(([name, value]) => [name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`), value]);
  return { ...Object.fromEntries(named), payload: message.payload, attempt: message.attempt };
}

function described(error) {
  const [, kind] = KINDS.find(([type]) => error instanceof type) ?? [null, "failed"];
  const { reason = error.name, retryAfterS: retry, message } = error;
  return { kind, reason, message, ...(kind === "rate_limited" ? { retry_after_s: retry } : {}) };
}

async function answerOf({ do: name, ...fields }) {
  const operation = Object.hasOwn(operations, name) ? operations[name] : null;
  if (operation === null) return { error: { kind: "unsupported", reason: `no operation ${name}` } };
  try {
    return { ok: await operation(fields) };
  } catch (error) {
    return { error: described(error) };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const { id, ...request } = JSON.parse(line);
  const text = JSON.stringify({ id, ...(await answerOf(request)) });
  await new Promise((written) => process.stdout.write(`${text}\n`, written));
  if (request.do === "close") break;
}
process.exit(0);
