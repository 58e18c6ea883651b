// A stream of the hub's server-sent events (WHATWG HTML, section 9.2), which reconnects and goes on after the last one.

import { decode } from "./canonical_json.js";
import { BackboneUnreachable, RateLimited, TrunklineError } from "./errors.js";
import { backoffS, now, PATIENCE_S, sleep } from "./hub_client.js";

// The gateway sends a comment at least every 15 s. A connection that is silent for longer is dead.
const SILENCE_S = 45;
const FIRST_PAUSE_S = 0.5;
const LINE_END = /\r\n|\n|\r/;
const EVENT_LIMIT = 64 * 1024 * 1024;

/**
 * Iterate over the events of a stream: `name`, `data` and `id`. It ends only by an error or the signal.
 *
 * @param {import("./hub_client.js").HubClient} hub
 * @param {string} path
 * @param {{signal: AbortSignal, patienceS?: number}} options `patienceS`: how long the gateway may be away
 */
export async function* serverEvents(hub, path, { signal, patienceS = PATIENCE_S }) {
  let [lastId, awaySince, failures] = [null, null, 0];
  for (;;) {
    let problem;
    try {
      const headers = { Accept: "text/event-stream", ...(lastId === null ? {} : { "Last-Event-ID": lastId }) };
      const response = await hub.stream("GET", path, { headers, signal });
      [awaySince, failures] = [null, 0];
      for await (const event of eventsOf(response)) {
        lastId = event.id ?? lastId;
        yield event;
      }
      problem = hub.unreachable(new Error("it ended the stream"));
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      problem = hub.unreachable(error);
    }
    awaySince ??= now();
    const isTemporary = problem instanceof BackboneUnreachable || problem instanceof RateLimited;
    if (!isTemporary || problem.isFinal || now() - awaySince > patienceS) throw problem;
    await sleep(pauseAfter(failures, problem.retryAfterS ?? 0), signal);
    failures += 1;
  }
}

/**
 * Return the seconds to wait after so many failures before: at random, so that the readers of a gateway that
 * stopped do not come back in the same moment.
 */
export function pauseAfter(failures, retryAfterS, chance = Math.random()) {
  return Math.max(backoffS(failures, FIRST_PAUSE_S, chance), retryAfterS * (1 + chance / 5));
}

async function* eventsOf(response) {
  const silence = setTimeout(() => response.destroy(new Error(`no byte for ${SILENCE_S} s`)), 1000 * SILENCE_S);
  try {
    yield* parseEvents(watched(response, silence));
  } finally {
    clearTimeout(silence);
    response.destroy();
  }
}

async function* watched(response, timer) {
  for await (const part of response.setEncoding("utf8")) {
    timer.refresh();
    yield part;
  }
}

/**
 * Parse server-sent events out of parts of text. Comments, and events without data, are left out.
 *
 * Each character is looked at once. An event, or a line, of more than `most` characters ends the iteration.
 */
export async function* parseEvents(parts, most = EVENT_LIMIT) {
  // `begun` has the pieces of a line without its end yet, and `size` the characters that wait for their event's end.
  let [begun, name, id, data, size, held] = [[], "message", null, [], 0, ""];
  for await (const part of parts) {
    const text = held + part;
    // A carriage return at the end may be the first half of a line's end.
    held = text.endsWith("\r") ? "\r" : "";
    const lines = text.slice(0, text.length - held.length).split(LINE_END);
    for (const [index, piece] of lines.entries()) {
      begun.push(piece);
      size += piece.length + 1;
      if (size > most) throw new TrunklineError(`the gateway's stream has an event of more than ${most} characters`);
      if (index === lines.length - 1) break;
      const line = begun.length === 1 ? piece : begun.join("");
      begun = [];
      if (line === "") {
        if (data.length > 0) yield { name, id, data: decodedData(data.join("\n")) };
        [name, data, size] = ["message", [], 0];
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "event") name = value;
      else if (field === "id") id = value;
      else if (field === "data") data.push(value);
    }
  }
}

function decodedData(text) {
  try {
    return decode(text);
  } catch {
    // Perhaps a number that only another door takes.
  }
  try {
    return JSON.parse(text);
  } catch {
    throw new TrunklineError("the gateway's stream holds an event whose data is not JSON");
  }
}
