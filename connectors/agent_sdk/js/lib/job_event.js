// The form of a job event, and the reasons not to send one.

import { canonical, canonicalBytes, decode } from "./canonical_json.js";
import { UsageError } from "./errors.js";
import { signEvent } from "./signing.js";
import { unsafePattern } from "./unsafe_text.js";

export const EVENTS = Object.freeze(["started", "progress", "permission_required", "completed", "error"]);
export const TERMINAL_EVENTS = Object.freeze(["completed", "error"]);
const DETAIL_LIMIT = 500;
const CONTROL = /[\u0000-\u001f\u007f-\u009f]/;
const JOB_ID = /^[0-9a-f]{8}$/;
const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$/;

/** Return whether this is a job id: 8 lower-case hex digits. */
export function isJobId(text) {
  return typeof text === "string" && JOB_ID.test(text);
}

/** Return whether this is a name of an agent, topic or schedule: letters, digits, dots, underscores, hyphens. */
export function isName(text) {
  return typeof text === "string" && NAME.test(text);
}

/** Return a detail in which unsafe text and control characters are replaced, for texts that others wrote. */
export function safeDetail(text) {
  const clean = String(text).replace(new RegExp(CONTROL, "g"), " ");
  const short = [...clean].slice(0, DETAIL_LIMIT).join("");
  return unsafePattern(short) === null ? short : "[masked]";
}

/**
 * Return the fields of a job event but `seq`, checked.
 *
 * @throws {UsageError} the backbone would reject or mask the event
 */
export function eventBody(jobId, event, detail, data, secret) {
  if (!EVENTS.includes(event)) throw notSent(`event: expected one of ${EVENTS.join(", ")}`);
  if (typeof detail !== "string" || [...detail].length > DETAIL_LIMIT) {
    throw notSent(`detail: expected text of at most ${DETAIL_LIMIT} characters`);
  }
  if (CONTROL.test(detail)) throw notSent("detail: holds a control character");
  if (data === null || typeof data !== "object" || Array.isArray(data)) throw notSent("data: expected an object");
  if (event === "permission_required" && detail.trim() === "") {
    throw notSent("detail: 'permission_required' must name the permission that it asks for");
  }
  if ("auth_token" in data) throw notSent("data.auth_token: a token must not travel in an event");
  if ("hmac_sig" in data) throw notSent("data.hmac_sig: only the publisher sets it");
  const pattern = unsafePattern(detail);
  if (pattern !== null) throw notSent(`detail: contains text that looks like a ${pattern}`);
  const body = { schema_version: 1, job_id: jobId, event, timestamp: new Date().toISOString(), detail, data };
  // Parsing the text again also copies `data`, which the caller may change before the event is sent.
  const text = canonical(body);
  if (text.includes(JSON.stringify(secret).slice(1, -1))) throw notSent("it contains the sender's own secret");
  return decode(text, { exact: true });
}

/** Return the signed bytes of an event. Throws UsageError if there are more than `limit`. */
export function signedEvent(body, seq, secret, limit) {
  const bytes = canonicalBytes(signEvent({ ...body, seq }, secret));
  if (bytes.length > limit) {
    throw new UsageError(`the event has ${bytes.length} bytes; at most ${limit} are taken`, { reason: "too_large" });
  }
  return bytes;
}

/** Return whether a sent event, decoded from its bytes, is the event that the caller wants to send now. */
export function isSameEvent(sent, body) {
  const { hmac_sig: _signature, ...data } = sent.data;
  const [one, other] = [sent, body].map(({ event, detail }) => ({ event, detail }));
  return canonical([one, data]) === canonical([other, body.data]);
}

function notSent(why) {
  return new UsageError(`not sent: ${why}`);
}
