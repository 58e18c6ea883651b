// Signatures and ids: HMAC-SHA256 over canonical JSON, ids derived from content, MQTT passwords.

import { createHash, createHmac, timingSafeEqual } from "node:crypto";

import { canonicalBytes, decode } from "./canonical_json.js";
import { UsageError } from "./errors.js";

const TAG = /^([0-9a-f]{8})\./;

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

function mac(secret, bytes) {
  return createHmac("sha256", Buffer.from(secret, "utf8")).update(bytes).digest("hex");
}

/** Return the bytes of a job event that are signed: its canonical JSON without `data.hmac_sig`. */
export function signedBytes(event) {
  if (!isObject(event?.data)) return canonicalBytes(event);
  const { hmac_sig: _signature, ...data } = event.data;
  return canonicalBytes({ ...event, data });
}

/** Return a copy of a job event with its signature in `data.hmac_sig`. An old signature is replaced. */
export function signEvent(event, secret) {
  if (!isObject(event?.data)) throw new UsageError("data: expected an object");
  return { ...event, data: { ...event.data, hmac_sig: mac(secret, signedBytes(event)) } };
}

/** Return whether a decoded job event has the signature of this secret. The comparison takes constant time. */
export function verifyEvent(event, secret) {
  return isSame(event?.data?.hmac_sig, mac(secret, signedBytes(event)));
}

/** Return the bytes of an agent's MQTT message that are signed: its canonical JSON without `hmac_sig`. */
export function signedMessageBytes(message) {
  const { hmac_sig: _signature, ...rest } = message;
  return canonicalBytes(rest);
}

/** Return a copy of an agent's MQTT message with its signature in `hmac_sig`. */
export function signMessage(message, secret) {
  return { ...message, hmac_sig: mac(secret, signedMessageBytes(message)) };
}

/**
 * Return the JSON text of an event with its signature. Unlike `signEvent` it takes the JSON text of the event, in
 * which `1.0` is a float.
 */
export function signEventText(json, secret) {
  return canonicalBytes(signEvent(decode(json, { exact: true }), secret)).toString("utf8");
}

function isSame(given, expected) {
  if (typeof given !== "string") return false;
  const [one, other] = [Buffer.from(given, "utf8"), Buffer.from(expected, "utf8")];
  return one.length === other.length && timingSafeEqual(one, other);
}

/**
 * Return the id that is derived from content: SHA-256 over the parts, each after its length as eight bytes.
 *
 * Over MQTT an event's `ce_id` has the parts topic and payload, over HTTP `job/<job id>` and payload.
 *
 * @param {...(string | Uint8Array)} parts
 */
export function contentId(...parts) {
  const hash = createHash("sha256");
  for (const part of parts) {
    const bytes = typeof part === "string" ? Buffer.from(part, "utf8") : part;
    const length = Buffer.alloc(8);
    length.writeBigUInt64BE(BigInt(bytes.length));
    hash.update(length).update(bytes);
  }
  return hash.digest("hex");
}

/** Return the MQTT user of a job's publisher: the job's id, and after a rotation also the tag of the secret. */
export function jobUser(jobId, secret) {
  const tag = TAG.exec(secret);
  return tag === null ? jobId : `${jobId}.${tag[1]}`;
}

/** Return the password of an MQTT user, derived from the secret of the job or agent. */
export function mqttPassword(secret, user) {
  return mac(secret, `trunkline mqtt password/${user}`);
}
