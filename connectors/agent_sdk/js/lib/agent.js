// An agent with a mailbox at the hub: it receives under leases, sends, asks, and uses topics and schedules.

import { createHash, randomUUID } from "node:crypto";
import { createReadStream } from "node:fs";

import { NoReply, NotFound, Refused, TrunklineError, UsageError } from "./errors.js";
import { inHandlings, sendKey } from "./handling.js";
import { HubClient, notAGateway, now, pathOf, PATIENCE_S } from "./hub_client.js";
import { isName } from "./job_event.js";
import { checkedWhole, LEASE_S_MOST, Message } from "./message.js";
import { given, Operations, sentFields } from "./operations.js";

const REALM = "default";
const POLL_S = 30;
const LIMIT_MOST = 1000;
// Proxies end connections that are silent for a minute.
const REPLY_S = 30;
const LEASE_S = 30;
const LONGEST_S = 3600;
const REPEATED = "seq_conflict";
const DUPLICATE = "duplicate";
const HUB = "hub";
const STATUS_TYPE = "status";

/** An agent: the mailbox of one principal of the hub. Close it, or use `await using`. */
export class Agent extends Operations {
  #hub;
  #closing = new AbortController();
  #received = [];
  #requests;

  /**
   * @param {string | null} name the agent's name; null: that of the credentials
   * @param {import("./credentials.js").Credentials} credentials
   * @param {{patienceS?: number}} [options] `patienceS`: how long a request is repeated while the gateway is away
   *   or the caller is above its limits
   */
  constructor(name, credentials, { patienceS = PATIENCE_S } = {}) {
    const own = name ?? credentials.name;
    if (own !== null && !isName(own)) throw new UsageError(`not an agent's name: ${own}`);
    if (credentials.name !== null && credentials.name !== own) {
      throw new UsageError(`the credentials are those of ${credentials.name}, not of ${own}`);
    }
    const hub = new HubClient(credentials.section("hub"), { caCerts: credentials.caCerts, patienceS });
    super(hub);
    this.name = own;
    this.#hub = hub;
    this.#requests = {
      settle: (message, how, fields, patienceS) => this.#ofLease(message, how, fields, patienceS),
      sendReply: (message, payload, options) => this.#replied(message, payload, options),
      fetchBlob: (message, options) => this.blob(message, options),
    };
  }

  /**
   * End all loops over messages, and the waits for replies, and give back what was received and nothing handles. A
   * message that is handled can still be settled.
   */
  async close() {
    this.#closing.abort(new UsageError("the agent is closed"));
    await Promise.allSettled(this.#received.map((message) => message.settleByEnd()));
    this.#hub.close();
  }

  async [Symbol.asyncDispose]() {
    await this.close();
  }

  /**
   * Iterate over the messages of the mailbox; wait for the next one. Each message is leased.
   *
   * When the loop asks for the next message, the last one is acknowledged, unless `message.handle` is still at it
   * or it is settled. In the body of a `for await` loop, what is sent has keys that a repeated handling makes again.
   * When the loop ends by `break`, `return` or an exception, the last one is given back: JavaScript does not tell an
   * iterator which of them it was.
   *
   * @param {object} [options]
   * @param {number} [options.limit] how many messages to lease at once
   * @param {number} [options.leaseS] the duration of a lease, which is extended until the message is settled
   * @param {number} [options.longestS] how long a handling may take; then the message is given back, and its
   *   `signal` aborts. Infinity: without an end
   * @param {number} [options.waitS] the loop ends when no message came for so long; without it, it never does
   * @param {AbortSignal} [options.signal] the loop throws its reason when it aborts
   * @returns {AsyncGenerator<Message, void>}
   */
  messages(options = {}) {
    return inHandlings(this.#messages(options));
  }

  /**
   * Take one message, to `handle`, `ack` or `nack` it. Null: none came within `waitS`. Without `waitS` it waits for one.
   * `close` gives it back unless it is handled or settled.
   *
   * @param {object} [options] as those of `messages`, without `limit`
   * @returns {Promise<Message | null>}
   */
  async receive(options = {}) {
    const [message = null] = await this.#taken(this.#checked({ ...options, limit: 1 }));
    this.#received = [...this.#received, message].filter((one) => one?.state === "open");
    return message;
  }

  async *#messages(options) {
    const wanted = this.#checked(options);
    const { stop } = wanted;
    let taken = [];
    try {
      for (;;) {
        taken = await this.#taken(wanted);
        if (taken.length === 0) return;
        for (; taken.length > 0; taken.shift()) {
          taken[0].begin();
          yield taken[0];
          await taken[0].settleByLoop();
          if (stop.aborted) throw stop.reason;
        }
      }
    } catch (error) {
      if (!this.#closing.signal.aborted || error !== this.#closing.signal.reason) throw error;
    } finally {
      // Those that the loop never got are given back, too. Their leases end by themselves if that fails.
      await Promise.allSettled(taken.map((message) => message.settleByEnd()));
    }
  }

  /**
   * Send a message and return when it is stored: `messageId`, `delivered`, `verdict`.
   *
   * The same `key` is the same message, which is sent once. Without it this call has one of its own; within the
   * handling of a message it is one that a repeated handling makes again for the same content.
   */
  async send(recipient, type, payload = null, options = {}) {
    const body = { recipient, type, payload, ...sentFields(options) };
    return this.#sent(body, sendKey("message", body, options.key), options.signal);
  }

  /**
   * Send a message, wait for the reply, and return it. Throws NoReply after `timeoutS`.
   *
   * @returns {Promise<Message>}
   */
  async ask(recipient, type, payload = null, { timeoutS = 30, key: own, signal, ...options } = {}) {
    const body = { recipient, type, payload, ...sentFields(options) };
    const { text: key } = sendKey("question", body, own);
    const stop = signal === undefined ? this.#closing.signal : AbortSignal.any([signal, this.#closing.signal]);
    const deadline = now() + timeoutS;
    for (;;) {
      const waitS = Math.max(0.001, Math.min(deadline - now(), REPLY_S));
      const query = { wait_reply: waitS.toFixed(3) };
      const answer = await this.#hub.post(pathOf("messages"), body, { key, query, waitS, signal: stop, isMessage: true });
      if (answer.reply) return new Message(this.#requests, answer.reply, null);
      if (now() >= deadline) {
        const messageId = answer.message_id;
        throw new NoReply(`no reply from ${recipient} within ${timeoutS} s to message ${messageId}`, { messageId });
      }
    }
  }

  /** Answer the sender of a message: the same as `message.reply`. */
  async reply(message, payload = null, options = {}) {
    return message.reply(payload, options);
  }

  async #replied(message, payload, { type = "answer", key, signal, ...options }) {
    const place = { inReplyTo: message.id, ...(message.thread === null ? {} : { thread: message.thread }) };
    const body = { recipient: message.sender, type, payload, ...sentFields({ ...place, ...options }) };
    const found = key === undefined ? message.handling.replyKey() : message.handling.ownKey(key);
    return this.#sent(body, found, signal);
  }

  async #sent(body, key, signal) {
    const answer = await this.#posted(pathOf("messages"), body, key, signal);
    if (answer === null) return { messageId: null, delivered: false, verdict: DUPLICATE };
    if (answer.message_id === undefined) throw notAGateway();
    return { messageId: answer.message_id, delivered: answer.delivered, verdict: answer.verdict };
  }

  // The answer is null if an earlier handling has sent another content under this key, which then stands.
  async #posted(path, body, { text: key, mayStand }, signal) {
    try {
      return await this.#hub.post(path, body, { key, signal, isMessage: true });
    } catch (error) {
      if (mayStand && error instanceof Refused && error.reason === REPEATED) return null;
      throw error;
    }
  }

  /** Publish a message to a topic: each subscriber gets a copy. Throws NotFound if nobody ever subscribed. */
  async publish(topic, type, payload = null, options = {}) {
    const body = { type, payload, ...sentFields(options) };
    const key = sendKey(`topic/${topic}`, body, options.key);
    const answer = await this.#posted(pathOf("topics", topic), body, key, options.signal);
    if (answer === null) return { messageId: null, topic, recipients: 0, verdict: DUPLICATE };
    if (answer.message_id === undefined) throw notAGateway();
    return { messageId: answer.message_id, topic, recipients: answer.recipients, verdict: answer.verdict };
  }

  /**
   * Set a schedule that posts a message again and again: `cron` in UTC, or `everyS`. Returns the schedule.
   *
   * @returns {Promise<Schedule>}
   */
  async schedule(name, recipient, type, payload = null, options = {}) {
    const { cron, everyS, missed, priority, expiresInS, signal } = options;
    if ((cron === undefined) === (everyS === undefined)) throw new UsageError("a schedule has `cron` or `everyS`");
    const times = { cron, every_s: everyS, missed, priority, expires_in_s: expiresInS };
    const body = given({ recipient, type, payload, ...times });
    const { text: key } = sendKey(`schedule/${name}`, body, options.key);
    return scheduleOf(await this.#hub.post(pathOf("schedules", name), body, { key, signal }));
  }

  /** Report what the agent does, by a message of the type `status` to the hub, which the log keeps. */
  async status(state, text, { signal } = {}) {
    return this.send(HUB, STATUS_TYPE, given({ status: state, text }), { signal });
  }

  /**
   * Upload a large content, and return `digest`, `bytes`, `contentType` and `keepUntil`. Pass the result as `blob`
   * to `send` or `publish`.
   *
   * @param {Uint8Array | string} content bytes, or the path of a file
   */
  async upload(content, { contentType = "application/octet-stream", signal } = {}) {
    const isPath = typeof content === "string";
    const { digest, size } = isPath ? await digestOfFile(content, signal) : digestOf(content);
    const source = isPath ? { open: () => createReadStream(content) } : { bytes: content };
    const headers = { "Content-Type": contentType, "Content-Length": size };
    const answer = await this.#hub.request("PUT", pathOf("blobs"), { ...source, headers, query: { digest }, signal });
    const stored = this.#hub.decoded(answer);
    const { bytes, content_type: type, keep_until: until } = stored;
    return { digest: stored.digest, bytes, contentType: type, keepUntil: new Date(until) };
  }

  /** Fetch the blob that a message refers to. Throws NotFound without one, or when it was removed. */
  async blob(message, { signal } = {}) {
    if (message.blobInfo === null) throw new NotFound(`message ${message.id} has no blob`);
    const path = pathOf("mailboxes", REALM, message.recipient, "messages", message.id, "blob");
    const { body } = await this.#hub.request("GET", path, { signal });
    if (digestOf(body).digest !== message.blobInfo.digest) {
      throw new TrunklineError(`the blob of message ${message.id} is damaged`, { reason: "damaged_blob" });
    }
    return body;
  }

  #checked({ limit = 1, leaseS = LEASE_S, longestS = LONGEST_S, waitS = Infinity, signal, patienceS }) {
    const isTime = (value) => typeof value === "number" && value >= 0;
    if (!isTime(longestS) || !isTime(waitS)) throw new UsageError("longestS and waitS are times in seconds");
    const stop = signal === undefined ? this.#closing.signal : AbortSignal.any([signal, this.#closing.signal]);
    const lease = { leaseS: checkedWhole("leaseS", leaseS, LEASE_S_MOST), longestS };
    return { limit: checkedWhole("limit", limit, LIMIT_MOST), lease, waitS, stop, patienceS };
  }

  async #taken({ limit, lease, waitS, stop, patienceS }) {
    const deadline = now() + waitS;
    for (;;) {
      const pollS = Math.max(0, Math.min(POLL_S, deadline - now()));
      const { messages, lease_id: id } = await this.#hub.get(pathOf("messages"), {
        query: { limit, wait: pollS.toFixed(3), lease: lease.leaseS },
        headers: { "X-Request-ID": randomUUID() },
        waitS: pollS,
        signal: stop,
        patienceS,
      });
      const theirs = { ...lease, id };
      const found = messages.map((fields) => new Message(this.#requests, fields, theirs));
      if (found.length > 0 || now() >= deadline) return found;
    }
  }

  async #ofLease(message, how, fields, patienceS) {
    const body = { lease_id: message.leaseId, message_ids: [message.id], ...fields };
    return this.#hub.post(pathOf("messages", how), body, { patienceS });
  }
}

function scheduleOf(shown) {
  const { schedule: name, recipient, kind: type, cron, every_s: everyS, status, next_run_at: nextRunAt, runs } = shown;
  return { name, recipient, type, cron, everyS, status, nextRunAt: nextRunAt && new Date(nextRunAt), runs };
}

function digestOf(bytes) {
  return { digest: createHash("sha256").update(bytes).digest("hex"), size: bytes.length };
}

async function digestOfFile(path, signal) {
  const hash = createHash("sha256");
  let size = 0;
  try {
    for await (const part of createReadStream(path, { signal })) {
      hash.update(part);
      size += part.length;
    }
  } catch (error) {
    if (signal?.aborted) throw signal.reason;
    if (error.code === "ENOENT") throw new NotFound(`no file ${path}`, { cause: error });
    throw new UsageError(`cannot read ${path}: ${error.code}`, { cause: error });
  }
  return { digest: hash.digest("hex"), size };
}
