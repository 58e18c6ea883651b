// Sends a job's events to the hub over HTTP: in the order of seq, with the same bytes at every attempt.

import { reasonOf } from "./answer_errors.js";
import { HubClient, pathOf } from "./hub_client.js";
import { TrunklineError } from "./errors.js";
import { contentId } from "./signing.js";

/** The way of a job's events over HTTP. An event without an answer stays in the outbox. */
export class HttpDelivery {
  #hub;
  #jobId;

  constructor(access, jobId, options) {
    this.#hub = new HubClient(access, options);
    this.#jobId = jobId;
  }

  /** Send events in order. `confirmed(event, receipt)` is awaited after each, whatever its verdict. */
  async deliver(events, confirmed, signal) {
    for (const event of events) {
      const bytes = Buffer.from(event.payload, "utf8");
      const answer = await this.#sent(event, bytes, signal);
      await confirmed(event, this.#receipt(event, bytes, answer));
    }
  }

  close() {
    this.#hub.close();
  }

  async #sent(event, bytes, signal) {
    const headers = { "Content-Type": "application/json" };
    try {
      return await this.#hub.request("POST", pathOf("jobs", this.#jobId, "events"), {
        bytes,
        headers,
        signal,
        isAnswer: isFinal,
      });
    } catch (error) {
      if (error instanceof TrunklineError) {
        error.message += `. Event ${event.seq} stays in the outbox and is sent first at the next call`;
      }
      throw error;
    }
  }

  #receipt(event, bytes, answer) {
    if (answer.status >= 300) {
      const ceId = contentId(`job/${this.#jobId}`, bytes);
      return receipt(ceId, event.seq, "rejected", reasonOf(answer) ?? null, null);
    }
    const told = this.#hub.decoded(answer);
    if (typeof told.ce_id !== "string" || !Array.isArray(told.position)) {
      throw new TrunklineError("the answer to an event is not that of a Trunkline gateway");
    }
    const [partition, offset] = told.position;
    return receipt(told.ce_id, told.seq, told.verdict, null, { partition, offset });
  }
}

/** Make a receipt. Its fields are those of the receipt over MQTT. */
export function receipt(ceId, seq, verdict, reason, position) {
  return Object.freeze({ ceId, seq, verdict, reason, position });
}

// Whether the answer is about the event itself, so that sending it again would change nothing.
function isFinal(answer) {
  if (answer.status >= 200 && answer.status < 300) return true;
  if (answer.headers["trunkline-verdict"] === "rejected") return true;
  // The gateway drops a body over its limit before the log. Without this, the event would block all others.
  return answer.status === 413 && reasonOf(answer) === "too_large";
}
