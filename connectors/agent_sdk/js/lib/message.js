// A message out of the mailbox: its fields, its lease, and what the agent does with it.

import { printable } from "./answer_errors.js";
import { LeaseLost, Refused, TrunklineError, UsageError } from "./errors.js";
import { Handling, within } from "./handling.js";
import { messageFields } from "./operations.js";
import { typeName } from "./unsafe_text.js";

const OPEN = "open";
const HANDLING = "handling";
const ACKNOWLEDGED = "acknowledged";
const GIVEN_BACK = "given back";
const LOST = "lost";
const NOT_LEASED = "not leased";
const REASON_LIMIT = 500;
export const LEASE_S_MOST = 86_400;
// A handler that threw, or an agent that ends, gives its messages back, and must not take long for it.
const PARTING_S = 2;

/** One message. The agent makes it; `state` tells whether it is settled. */
export class Message {
  #agent;
  #lease;
  #state;
  #timer = null;
  #isReported = false;
  #lost = new AbortController();

  /**
   * @param {object} agent the agent's requests: `settle`, `sendReply`, `fetchBlob`
   * @param {object} fields the message as the hub's API shows it
   * @param {{id: string, leaseS: number, longestS: number} | null} lease null: the message was taken for good
   */
  constructor(agent, fields, lease) {
    this.#agent = agent;
    this.#lease = lease;
    this.#state = lease === null ? NOT_LEASED : OPEN;
    this.id = fields.id;
    this.timestamp = new Date(fields.timestamp);
    this.sender = fields.sender;
    this.recipient = fields.recipient;
    this.type = fields.type;
    this.payload = fields.payload;
    Object.assign(this, messageFields(fields));
    this.topic = fields.topic ?? null;
    this.replayOf = fields.replay_of ?? null;
    this.attempt = fields.attempt ?? 1;
    this.blobInfo = blobInfo(fields.blob);
    // What is sent while the message is handled has keys that a repeated handling makes again.
    this.handling = new Handling(this.id, this.attempt);
    this.leaseId = lease?.id ?? null;
    if (lease === null) return;
    lease.endsAt = performance.now() + 1000 * lease.longestS;
    this.#extendLater();
  }

  /** The state: "open", "handling", "acknowledged", "given back", "lost" or "not leased". */
  get state() {
    return this.#state;
  }

  /**
   * A signal that aborts when the lease is lost, or the handling has taken longer than `longestS`, so that a handler
   * can stop. Its reason is a LeaseLost.
   */
  get signal() {
    return this.#lost.signal;
  }

  /**
   * Run a handler. The message is acknowledged when it ends well. When it throws, the message is given back with
   * the name of the error's type, and the error is thrown on. The lease is extended while the handler runs, and the
   * keys of what it sends are derived from the message's id, so that a repeated handling sends nothing twice.
   *
   * @template T
   * @param {(message: Message) => T | Promise<T>} work
   * @returns {Promise<T>} the handler's result
   */
  async handle(work) {
    if (this.#state !== OPEN && this.#state !== NOT_LEASED) throw new UsageError(`the message is ${this.#state}`);
    if (this.#state === OPEN) this.#state = HANDLING;
    let result;
    try {
      result = await within(this.handling, () => work(this));
    } catch (error) {
      // The lease ends by itself if the message cannot be given back: the handler's error counts more.
      await this.#giveBack(error).catch(() => {});
      throw error;
    }
    if (this.#state === LOST) throw this.#reported();
    if (this.#state === HANDLING) await this.ack();
    return result;
  }

  /** Acknowledge the message, so that it is never handed out again. Throws LeaseLost if another consumer has it. */
  async ack() {
    await this.#settle("ack", ACKNOWLEDGED, {});
  }

  /** Give the message back. It is handed out again at once, or is dead after the last attempt. */
  async nack(reason = "") {
    await this.#settle("nack", GIVEN_BACK, { reason: printable(reason, REASON_LIMIT, " ") });
  }

  /** Set a new end for the lease, so many seconds from now. It is also extended by itself. */
  async extend(seconds = this.#lease?.leaseS) {
    await this.#extend(seconds);
  }

  /**
   * Answer the sender. The reply carries the message's id and its conversation.
   *
   * The idempotency key follows from the message and the number of the reply. When the message is handed out
   * again, the first reply to it is thus not sent a second time.
   */
  async reply(payload = null, options = {}) {
    return this.#agent.sendReply(this, payload, options);
  }

  /** Fetch the blob that the message refers to, and check its SHA-256. */
  async blob(options = {}) {
    return this.#agent.fetchBlob(this, options);
  }

  // Note that the handling begins. The messages that wait behind it have their time from now.
  begin() {
    if (this.#lease !== null) this.#lease.endsAt = performance.now() + 1000 * this.#lease.longestS;
  }

  // Acknowledge the message because the loop asks for the next one, unless a handler takes care of it.
  async settleByLoop() {
    if (this.#state === OPEN) {
      // If the acknowledgement fails, the message is not given back: its work is done.
      this.#state = HANDLING;
      await this.ack();
    }
    if (this.#state === LOST && !this.#isReported) throw this.#reported();
  }

  // Give the message back because its loop has ended.
  async settleByEnd() {
    if (this.#state !== OPEN) return;
    const reason = "the agent ended before it acknowledged the message";
    await this.#settle("nack", GIVEN_BACK, { reason }, PARTING_S);
  }

  async #extend(seconds, patienceS) {
    if (this.#lease === null) throw new UsageError("the message is not leased");
    const lease = checkedWhole("seconds", seconds, LEASE_S_MOST);
    this.#refuseIfLost(await this.#agent.settle(this, "extend", { lease }, patienceS));
  }

  // The patience with a request of the background: what it cannot do soon, the next one does.
  get #patienceS() {
    return Math.min(5, this.#lease.leaseS / 6);
  }

  async #giveBack(error) {
    if (this.#state !== HANDLING) return;
    await this.#settle("nack", GIVEN_BACK, { reason: printable(typeName(error), REASON_LIMIT, " ") }, PARTING_S);
  }

  async #settle(how, state, fields, patienceS) {
    if (this.#state === state || this.#state === NOT_LEASED) return;
    if (this.#state === LOST) throw this.#reported();
    if (this.#state === ACKNOWLEDGED || this.#state === GIVEN_BACK) {
      throw new UsageError(`the message is ${this.#state} already`);
    }
    const before = this.#state;
    this.#state = state;
    clearTimeout(this.#timer);
    try {
      this.#refuseIfLost(await this.#agent.settle(this, how, fields, patienceS));
    } catch (error) {
      if (error instanceof LeaseLost) throw this.#reported();
      this.#state = before;
      throw error;
    }
  }

  #refuseIfLost(answer) {
    const fault = answer.refused.find((one) => one.message_id === this.id);
    if (fault === undefined) return;
    const error = new LeaseLost(`message ${this.id}: ${fault.message}`, { reason: fault.reason });
    this.#lose(error);
    throw error;
  }

  #reported() {
    this.#isReported = true;
    return this.#lost.signal.reason;
  }

  #lose(error) {
    this.#state = LOST;
    clearTimeout(this.#timer);
    this.#lost.abort(error);
  }

  #extendLater() {
    const leftMs = this.#lease.endsAt - performance.now();
    const pauseMs = Math.min((1000 * this.#lease.leaseS) / 3, Math.max(0, leftMs));
    this.#timer = setTimeout(async () => {
      if (performance.now() >= this.#lease.endsAt) return this.#giveUp();
      try {
        await this.#extend(this.#lease.leaseS, this.#patienceS);
      } catch (error) {
        // Without an answer the lease may still be ours: the holder can acknowledge it until it is handed out.
        if (error instanceof LeaseLost) return;
        if (error instanceof Refused || !(error instanceof TrunklineError)) return;
      }
      if (this.#state === OPEN || this.#state === HANDLING) this.#extendLater();
    }, pauseMs);
    this.#timer.unref();
  }

  // The handler hangs: give the message back, so that it is handed out again, and tell the handler.
  async #giveUp() {
    const reason = `it was handled for longer than ${this.#lease.longestS} s`;
    const advice = "make the work repeatable, and let longestS be longer than it takes; Infinity has no end";
    this.#lose(new LeaseLost(`message ${this.id} was given back: ${reason}`, { advice }));
    // If it cannot be given back, its lease ends by itself.
    await this.#agent.settle(this, "nack", { reason }, this.#patienceS).catch(() => {});
  }
}

/** Return a number rounded up. Throws UsageError unless it is between 1 and `most`. */
export function checkedWhole(name, value, most) {
  const whole = Math.ceil(value);
  if (!(whole >= 1 && whole <= most)) throw new UsageError(`${name}: ${value} is not a number from 1 to ${most}`);
  return whole;
}

function blobInfo(blob) {
  if (blob === undefined) return null;
  return { digest: blob.digest, bytes: blob.bytes, contentType: blob.content_type };
}
