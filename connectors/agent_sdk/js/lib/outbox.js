// The outbox: the events of one job that are stored on disk until they are confirmed.
//
// Each job has one JSON file, mode 0600, which is replaced as a whole and synced before an event is sent. A sequence
// number (seq) is on disk together with the signed bytes that carry it. After a crash, the same bytes are sent again.
// File and lock are those of the Python library: both may publish for the same job, one after the other.

import { randomBytes } from "node:crypto";
import { mkdir, open, readFile, rename, unlink } from "node:fs/promises";
import { dirname, join } from "node:path";

import { decode } from "./canonical_json.js";
import { TrunklineError, UsageError } from "./errors.js";
import { isJobId, TERMINAL_EVENTS } from "./job_event.js";
import { locked } from "./outbox_lock.js";

/** One job's outbox, locked from `open` to `close`. */
export class JobOutbox {
  #path;
  #state;
  #unlock;
  #jobId;

  constructor(path, jobId, state, unlock) {
    this.#path = path;
    this.#jobId = jobId;
    this.#state = state;
    this.#unlock = unlock;
  }

  /**
   * Lock and read the outbox of a job.
   *
   * @param {string} stateDir the folder of the file, which is made if it is missing
   * @param {string} jobId
   * @param {number} lockTimeoutS
   * @throws {import("./errors.js").OutboxBusy} another process has the lock
   * @throws {TrunklineError} the file cannot be read, or is not an outbox of this job
   */
  static async open(stateDir, jobId, lockTimeoutS) {
    if (!isJobId(jobId)) throw new UsageError(`not a job id (8 lower-case hex digits): ${JSON.stringify(jobId)}`);
    const path = join(stateDir, `${jobId}.json`);
    const busy = `another process has been publishing for job ${jobId}`;
    let unlock;
    try {
      await mkdir(stateDir, { recursive: true, mode: 0o700 });
      unlock = await locked(join(stateDir, `${jobId}.lock`), lockTimeoutS, busy);
    } catch (error) {
      if (error instanceof TrunklineError) throw error;
      throw new TrunklineError(`cannot keep the state of job ${jobId}: ${error.message}`, { cause: error });
    }
    try {
      return new JobOutbox(path, jobId, await read(path, jobId), unlock);
    } catch (error) {
      await unlock();
      throw error;
    }
  }

  /** Release the lock. */
  async close() {
    await this.#unlock();
  }

  async [Symbol.asyncDispose]() {
    await this.close();
  }

  /** The highest seq in use, 0 before the first. */
  get lastSeq() {
    return this.#state.last_seq;
  }

  /** The seq of the event that ends the job; null while no such event was stored. */
  get endedSeq() {
    return this.#state.ended_seq;
  }

  /** The unconfirmed events in the order of seq: `seq`, `event`, and the bytes to send as text in `payload`. */
  get pending() {
    return [...this.#state.outbox];
  }

  /** Store a new event with the next seq. `build(seq)` returns its signed bytes. It is on disk when this returns. */
  async add(event, build) {
    const seq = this.#state.last_seq + 1;
    const made = { seq, payload: build(seq).toString("utf8"), event };
    const outbox = [...this.#state.outbox, made];
    const endedSeq = TERMINAL_EVENTS.includes(event) ? seq : this.#state.ended_seq;
    await this.#save({ ...this.#state, last_seq: seq, ended_seq: endedSeq, outbox });
    return made;
  }

  /** Replace the bytes of unconfirmed events, as after a rotation of the secret. `build` returns null for no change. */
  async renew(build) {
    const news = this.#state.outbox.map(build);
    if (news.every((one) => one === null)) return;
    const outbox = this.#state.outbox.map((one, at) =>
      news[at] === null ? one : { ...one, payload: news[at].toString("utf8") },
    );
    await this.#save({ ...this.#state, outbox });
  }

  /** Remove a confirmed event. If a rejected one would have ended the job, the job counts as not ended. */
  async confirm(event, { rejected = false } = {}) {
    const outbox = this.#state.outbox.filter((one) => one.seq !== event.seq);
    const endedSeq = rejected && this.#state.ended_seq === event.seq ? null : this.#state.ended_seq;
    await this.#save({ ...this.#state, ended_seq: endedSeq, outbox });
  }

  async #save(state) {
    const ordered = {
      job_id: state.job_id,
      last_seq: state.last_seq,
      ended_seq: state.ended_seq,
      outbox: state.outbox.map(({ seq, payload, event }) => ({ seq, payload, event })),
    };
    try {
      await replaceFile(this.#path, JSON.stringify(ordered));
    } catch (error) {
      throw new TrunklineError(`cannot write the state of job ${this.#jobId}: ${error.message}`, { cause: error });
    }
    this.#state = state;
  }
}

async function read(path, jobId) {
  let state;
  try {
    state = decode(await readFile(path));
  } catch (error) {
    if (error.code === "ENOENT") return { job_id: jobId, last_seq: 0, ended_seq: null, outbox: [] };
    if (error.code !== undefined) {
      throw new TrunklineError(`cannot read the state of job ${jobId}: ${error.message}`, { cause: error });
    }
    state = null;
  }
  if (!isState(state, jobId)) {
    throw new TrunklineError(`${path} is not the state of job ${jobId}: another program has changed it`, {
      reason: "outbox_damaged",
      advice: "restore the file, or remove it if this job has published nothing yet",
    });
  }
  return { ended_seq: null, outbox: [], ...state };
}

function isState(state, jobId) {
  const isSeq = (value) => Number.isSafeInteger(value) && value >= 0;
  return (
    state !== null &&
    typeof state === "object" &&
    state.job_id === jobId &&
    isSeq(state.last_seq ?? 0) &&
    (state.ended_seq === undefined || state.ended_seq === null || isSeq(state.ended_seq)) &&
    Array.isArray(state.outbox ?? []) &&
    (state.outbox ?? []).every(
      (one) => isSeq(one?.seq) && typeof one.payload === "string" && typeof one.event === "string",
    )
  );
}

/** Write a file that only its owner can read. A reader finds the old content or the new one, also after a power cut. */
export async function replaceFile(path, text) {
  const folder = dirname(path);
  const draft = join(folder, `.${process.pid}.${randomBytes(6).toString("hex")}`);
  try {
    const file = await open(draft, "wx", 0o600);
    try {
      await file.writeFile(text);
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(draft, path);
  } catch (error) {
    await unlink(draft).catch(() => {});
    throw error;
  }
  const entry = await open(folder, "r");
  try {
    await entry.sync();
  } finally {
    await entry.close();
  }
}
