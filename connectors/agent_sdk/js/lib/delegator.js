// A delegator: it registers jobs, follows them to their end, and cancels them.

import { NoReply, TrunklineError } from "./errors.js";
import { serverEvents } from "./event_stream.js";
import { sendKey } from "./handling.js";
import { HubClient, now, pathOf, PATIENCE_S } from "./hub_client.js";

const TERMINAL = ["completed", "error", "cancelled"];
const JOB_EVENT = "job.event";
const JOB_CANCELLED = "job.cancelled";

/** A registered job. Printing it does not show its secret. */
export class SubmittedJob {
  constructor({ job_id: jobId, secret, position }) {
    const [partition, offset] = position;
    this.jobId = jobId;
    this.position = { partition, offset };
    Object.defineProperty(this, "secret", { value: secret });
  }

  /** The variables that `Job.fromEnvironment` reads, for the process of the agent. */
  environment() {
    return { TRUNKLINE_JOB_ID: this.jobId, TRUNKLINE_JOB_SECRET: this.secret };
  }
}

/** A client that delegates jobs. Close it, or use `await using`. */
export class Delegator {
  #hub;
  #closing = new AbortController();
  #patienceS;

  /**
   * @param {import("./credentials.js").Credentials} credentials
   * @param {{patienceS?: number}} [options]
   */
  constructor(credentials, { patienceS = PATIENCE_S } = {}) {
    this.#patienceS = patienceS;
    this.#hub = new HubClient(credentials.section("hub"), { caCerts: credentials.caCerts, patienceS });
  }

  /** End all watches, and close the connections. */
  async close() {
    this.#closing.abort(new TrunklineError("the delegator is closed", { reason: "closed" }));
    this.#hub.close();
  }

  async [Symbol.asyncDispose]() {
    await this.close();
  }

  /**
   * Register a job. The result has its id and the secret that signs its events. Without `key` this call has one of its
   * own; within the handling of a message it is one that a repeated handling makes again for the same job.
   *
   * @param {{description: string, session?: string, broker?: object, notify?: ("end" | "permission")[],
   *   key?: string, signal?: AbortSignal}} job
   * @returns {Promise<SubmittedJob>}
   */
  async submit({ description, session, broker, notify, key, signal }) {
    const body = { description, session, notify, broker: broker && brokerFields(broker) };
    // The broker may have a password, of which no digest belongs into the log.
    const found = key ?? sendKey("job", { description, session, notify }).text;
    return new SubmittedJob(await this.#hub.post(pathOf("jobs"), body, { key: found, signal }));
  }

  /** Cancel a job that has not ended. Returns its status. */
  async cancel(jobId, { reason = "", key, signal } = {}) {
    const answer = await this.#hub.post(pathOf("jobs", jobId, "cancel"), { reason }, { key, signal });
    return answer.status;
  }

  /** Return a job as the hub shows it. */
  async show(jobId, { signal } = {}) {
    return this.#hub.get(pathOf("jobs", jobId), { signal });
  }

  /**
   * Iterate over the accepted events of a job, to its end. A job that had ended before gives its last event, with
   * `fromSnapshot`. The stream reconnects by itself.
   *
   * @param {string} jobId
   * @param {object} [options]
   * @param {number} [options.idleTimeoutS] the longest time without an event; without it there is no limit
   * @param {number} [options.totalTimeoutS] the longest time in all; without it there is no limit
   * @param {AbortSignal} [options.signal]
   * @throws {NoReply} with the reason `idle_timeout` or `total_timeout`
   */
  async *watch(jobId, { idleTimeoutS = Infinity, totalTimeoutS = Infinity, signal } = {}) {
    const timers = new WatchTimers(jobId, idleTimeoutS, totalTimeoutS);
    const signals = [timers.signal, this.#closing.signal, ...(signal === undefined ? [] : [signal])];
    const stop = AbortSignal.any(signals);
    const events = serverEvents(this.#hub, pathOf("jobs", jobId, "events"), { signal: stop, patienceS: this.#patienceS });
    try {
      timers.start();
      for await (const { name, data } of events) {
        const found = name === "settled" ? ofRecord(jobId, data) : name === "snapshot" ? ofSnapshot(jobId, data) : null;
        if (found === null) continue;
        timers.stop();
        yield found;
        if (found.isEnd) return;
        timers.start();
      }
    } finally {
      timers.stop();
      await events.return();
    }
  }
}

// Both time limits of a watch. They stand still while the caller handles an event.
class WatchTimers {
  #jobId;
  #idleS;
  #totalS;
  #end;
  #timer;
  #late = new AbortController();

  constructor(jobId, idleS, totalS) {
    this.#jobId = jobId;
    this.#idleS = idleS;
    this.#totalS = totalS;
    this.#end = now() + totalS;
  }

  get signal() {
    return this.#late.signal;
  }

  start() {
    const leftS = this.#end - now();
    const waitS = Math.max(0, Math.min(this.#idleS, leftS));
    if (waitS === Infinity) return;
    const isTotal = leftS <= this.#idleS;
    const [reason, limitS] = isTotal ? ["total_timeout", this.#totalS] : ["idle_timeout", this.#idleS];
    const text = `job ${this.#jobId} ${isTotal ? "did not end" : "had no event"} within ${limitS} s`;
    const error = new NoReply(text, { reason, advice: "watch it again, or look at it: ./trunkline jobs show" });
    this.#timer = setTimeout(() => this.#late.abort(error), Math.min(1000 * waitS, 2 ** 31 - 1));
  }

  stop() {
    clearTimeout(this.#timer);
  }
}

function ofRecord(jobId, { type, verdict, seq, late, status_after: status, position, logged_at: loggedAt, body }) {
  if (verdict !== "accepted" || (type !== JOB_EVENT && type !== JOB_CANCELLED)) return null;
  const { hmac_sig: _signature, ...data } = body?.data ?? {};
  return {
    jobId,
    event: type === JOB_EVENT ? body?.event : "cancelled",
    seq,
    detail: (type === JOB_EVENT ? body?.detail : body?.reason) ?? "",
    data,
    timestamp: body?.timestamp ?? null,
    status,
    late,
    position: { partition: position[0], offset: position[1] },
    loggedAt,
    fromSnapshot: false,
    isEnd: TERMINAL.includes(status),
  };
}

function ofSnapshot(jobId, { row }) {
  if (!row || !TERMINAL.includes(row.status)) return null;
  return {
    jobId,
    event: row.status === "cancelled" ? "cancelled" : row.last_event,
    seq: row.last_seq,
    detail: row.last_detail ?? "",
    data: {},
    timestamp: null,
    status: row.status,
    late: false,
    position: null,
    loggedAt: row.ended_at,
    fromSnapshot: true,
    isEnd: true,
  };
}

function brokerFields({ caCerts, ...fields }) {
  return { ...fields, ca_certs: caCerts };
}
