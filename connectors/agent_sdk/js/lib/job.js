// A job as its agent sees it: it reports events, numbered and signed, and stored on disk until they are confirmed.

import { homedir } from "node:os";
import { join } from "node:path";

import { decode } from "./canonical_json.js";
import { Credentials } from "./credentials.js";
import { EventRejected, UsageError } from "./errors.js";
import { HttpDelivery } from "./http_delivery.js";
import { PATIENCE_S } from "./hub_client.js";
import { eventBody, isJobId, isSameEvent, safeDetail, signedEvent } from "./job_event.js";
import { MqttDelivery } from "./mqtt_delivery.js";
import { JobOutbox } from "./outbox.js";
import { signEvent, verifyEvent } from "./signing.js";
import { typeName } from "./unsafe_text.js";
import { canonicalBytes } from "./canonical_json.js";

const PAYLOAD_BYTES = 1024 * 1024;
const LOCK_MARGIN_S = 30;

/** The publisher of one job's events. Its calls are carried out one after the other, in their order. */
export class Job {
  #secret;
  #delivery;
  #stateDir;
  #payloadBytes;
  #lockTimeoutS;
  #last = Promise.resolve();
  #hasEnded = false;

  /**
   * @param {string} jobId
   * @param {string} secret the job's secret, which signs the events and is never sent
   * @param {object} options one of `hub` and `mqtt`
   * @param {Credentials | import("./credentials.js").HubAccess} [options.hub] events go over HTTP
   * @param {object} [options.mqtt] events go over MQTT: the broker, see README.md
   * @param {string} [options.stateDir] the folder of the outbox
   * @param {number} [options.patienceS] how long a request is repeated over HTTP
   */
  constructor(jobId, secret, options = {}) {
    if (!isJobId(jobId)) throw new UsageError(`not a job id (8 lower-case hex digits): ${JSON.stringify(jobId)}`);
    if (!isText(secret)) throw new UsageError("the job's secret is empty");
    const { hub, mqtt, stateDir = defaultStateDir(), patienceS = PATIENCE_S, payloadBytes = PAYLOAD_BYTES } = options;
    if ((hub === undefined) === (mqtt === undefined)) throw new UsageError("a job needs `hub` or `mqtt`, and not both");
    this.id = jobId;
    this.#secret = secret;
    this.#stateDir = stateDir;
    this.#payloadBytes = payloadBytes;
    this.#lockTimeoutS = options.lockTimeoutS ?? patienceS + LOCK_MARGIN_S;
    this.#delivery = mqtt === undefined ? overHttp(hub, jobId, patienceS) : new MqttDelivery(mqtt, jobId, secret);
  }

  /**
   * Make the job of this process: TRUNKLINE_JOB_ID and TRUNKLINE_JOB_SECRET. Without `mqtt` the hub comes from the
   * environment, too (see `Credentials.fromEnvironment`).
   */
  static fromEnvironment(options = {}, environment = process.env) {
    const { TRUNKLINE_JOB_ID: jobId, TRUNKLINE_JOB_SECRET: secret } = environment;
    if (!jobId || !secret) throw new UsageError("set TRUNKLINE_JOB_ID and TRUNKLINE_JOB_SECRET");
    const isComplete = options.hub !== undefined || options.mqtt !== undefined;
    const door = isComplete ? {} : { hub: Credentials.fromEnvironment(environment) };
    return new Job(jobId, secret, { ...door, ...options });
  }

  /** Report that the work begins. It is the first event of a job. */
  async started(detail = "", data = {}, options = {}) {
    return this.publish("started", detail, data, options);
  }

  /** Report progress. */
  async progress(detail = "", data = {}, options = {}) {
    return this.publish("progress", detail, data, options);
  }

  /** Report that the job waits for a permission, which `detail` names. */
  async permissionRequired(detail, data = {}, options = {}) {
    return this.publish("permission_required", detail, data, options);
  }

  /** End the job as completed. */
  async completed(detail = "", data = {}, options = {}) {
    return this.publish("completed", detail, data, options);
  }

  /** End the job as failed. */
  async error(detail = "", data = {}, options = {}) {
    return this.publish("error", detail, data, options);
  }

  /**
   * Run the job's work, and end the job by its outcome: `completed`, or `error` with the exception's type. If the
   * work has ended the job itself, nothing is added.
   *
   * @template T
   * @param {(job: Job) => T | Promise<T>} work
   * @returns {Promise<T>} the result of the work; its exception is thrown on
   */
  async run(work) {
    let result;
    try {
      result = await work(this);
    } catch (error) {
      await this.#endWith(error).catch((other) => {
        if (error instanceof Error && error.cause === undefined) error.cause = other;
      });
      throw error;
    }
    await this.#last.catch(() => {});
    if (!this.#hasEnded) await this.completed();
    return result;
  }

  /**
   * Send one event, after earlier unconfirmed ones, and return its receipt: `ceId`, `seq`, `verdict`, `reason` and
   * `position`. A verdict null counts as delivered.
   *
   * @throws {UsageError} the event is invalid, or the job has ended; nothing was sent
   * @throws {EventRejected} Trunkline rejected this event, or an earlier one
   * @throws {import("./errors.js").BackboneUnreachable} the event is not confirmed. It stays in the outbox and is
   *   sent first at the next call, so do not publish it again.
   */
  async publish(event, detail, data = {}, { signal } = {}) {
    const body = eventBody(this.id, event, detail, data, this.#secret);
    return this.#next((outbox) => this.#published(outbox, body, signal));
  }

  /** Send all events that are not confirmed yet, as after a crash. Returns how many they were. */
  async resend({ signal } = {}) {
    return this.#next(async (outbox) => {
      const { pending } = outbox;
      if (pending.length > 0) await this.#deliver(outbox, pending.at(-1), signal);
      return pending.length;
    });
  }

  /** Wait for the calls under way, and close the connection. The job is not ended: see `run`. */
  async close() {
    await this.#last.catch(() => {});
    this.#delivery.close();
  }

  async [Symbol.asyncDispose]() {
    await this.close();
  }

  // Calls that are made at once get their numbers in the order of the calls.
  #next(action) {
    const done = this.#last.then(() => this.#withOutbox(action));
    this.#last = done.catch(() => {});
    return done;
  }

  async #withOutbox(action) {
    const outbox = await JobOutbox.open(this.#stateDir, this.id, this.#lockTimeoutS);
    try {
      await outbox.renew((pending) => this.#signedAnew(pending));
      return await action(outbox);
    } finally {
      this.#hasEnded = outbox.endedSeq !== null;
      await outbox.close();
    }
  }

  async #published(outbox, body, signal) {
    return this.#deliver(outbox, await this.#entered(outbox, body), signal);
  }

  async #entered(outbox, body) {
    if (outbox.endedSeq !== null) {
      // The caller publishes the unconfirmed end again: it is the same event, not a second one.
      const end = outbox.pending.find((one) => one.seq === outbox.endedSeq);
      if (end !== undefined && isSameEvent(fieldsOf(end), body)) return end;
      throw new UsageError(`job ${this.id} has ended with seq ${outbox.endedSeq}: nothing may follow`);
    }
    if (body.event === "started" && outbox.lastSeq > 0) {
      throw new UsageError(`'started' is the first event of a job; this one is at seq ${outbox.lastSeq}`);
    }
    return outbox.add(body.event, (seq) => signedEvent(body, seq, this.#secret, this.#payloadBytes));
  }

  async #deliver(outbox, wanted, signal) {
    const receipts = new Map();
    const confirmed = async (event, receipt) => {
      await outbox.confirm(event, { rejected: receipt.verdict === "rejected" });
      receipts.set(event.seq, receipt);
    };
    await this.#delivery.deliver(outbox.pending, confirmed, signal);
    const own = receipts.get(wanted.seq);
    const rejected = [own, ...receipts.values()].find((one) => one.verdict === "rejected");
    if (rejected !== undefined) throw new EventRejected(rejected);
    return own;
  }

  // After a rotation of the secret, an event gets a new signature. The backbone recognises it by its content.
  #signedAnew(pending) {
    const event = fieldsOf(pending);
    return verifyEvent(event, this.#secret) ? null : canonicalBytes(signEvent(event, this.#secret));
  }

  async #endWith(error) {
    await this.#last.catch(() => {});
    if (!this.#hasEnded) await this.error(safeDetail(typeName(error)));
  }
}

function fieldsOf(pending) {
  return decode(Buffer.from(pending.payload, "utf8"), { exact: true });
}

function overHttp(hub, jobId, patienceS) {
  const isComplete = hub instanceof Credentials;
  const caCerts = isComplete ? hub.caCerts : null;
  return new HttpDelivery(isComplete ? hub.section("hub") : hub, jobId, { caCerts, patienceS });
}

function isText(value) {
  return typeof value === "string" && value.length > 0;
}

function defaultStateDir() {
  let home = "";
  try {
    home = process.env.XDG_STATE_HOME ? "" : homedir();
  } catch {
    // This user has neither HOME nor an entry in /etc/passwd.
    throw new UsageError("this user has no home folder for outboxes", { advice: "give stateDir, or set XDG_STATE_HOME" });
  }
  return join(process.env.XDG_STATE_HOME || join(home, ".local", "state"), "trunkline-agent", "jobs");
}
