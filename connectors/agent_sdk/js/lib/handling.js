// Idempotency keys of what is sent while a message is handled, so that a repeated handling sends nothing twice.
//
// The library for Python makes the same keys: connectors/agent_sdk/trunkline_agent/hub/hub_requests.py says how.
// Both are tested with `derived_keys` of ../vectors/hub.json.

import { AsyncLocalStorage } from "node:async_hooks";
import { createHash, randomUUID } from "node:crypto";

import { canonical, canonicalBytes, decode } from "./canonical_json.js";
import { UsageError } from "./errors.js";

const KEY_MOST = 255;
const KEY = /^[!-~]{1,255}$/;
// The scope of the present code: the handling of the message at work, and the scope around it.
const scopes = new AsyncLocalStorage();

/** One handling of a message, from which the keys of its requests are derived. */
export class Handling {
  #id;
  #isRepeated;
  #counts = new Map();

  constructor(messageId, attempt) {
    this.#id = messageId;
    this.#isRepeated = attempt > 1;
  }

  /** Return the key of a request with this body; the next one with the same gets another key. */
  contentKey(what, body) {
    // A text is decoded, so that 1.0 and 1 are the same number, as they are for the other code here.
    const digest = sha256(`${what}\0${canonical(decode(canonicalBytes(body)))}`).slice(0, 32);
    return { text: `${this.#id}/${digest}/${this.#next(digest)}`, mayStand: false };
  }

  /** Return the key of the next reply to the message. */
  replyKey() {
    return { text: `${this.#id}/reply/${this.#next("reply")}`, mayStand: this.#isRepeated };
  }

  /** Return the key that belongs to a key of the caller within this handling. */
  ownKey(key) {
    const text = `${this.#id}/key/${checkedKey(key)}`;
    const short = text.length > KEY_MOST ? `${this.#id}/key/${sha256(key)}` : text;
    return { text: short, mayStand: this.#isRepeated };
  }

  #next(what) {
    this.#counts.set(what, (this.#counts.get(what) ?? 0) + 1);
    return this.#counts.get(what);
  }
}

/**
 * Return the key of a request: derived within a handling, else the caller's or a new one.
 *
 * `mayStand`: an earlier handling may have sent another content under this key, which then stands.
 */
export function sendKey(what, body, key) {
  const handling = presentHandling();
  if (handling === null) return { text: key === undefined ? randomUUID() : checkedKey(key), mayStand: false };
  return key === undefined ? handling.contentKey(what, body) : handling.ownKey(key);
}

/** Run a function within a handling. */
export function within(handling, work) {
  return scopes.run({ handling, outer: null }, work);
}

/** Return an iterator over messages whose loop runs each of its rounds within the handling of the message. */
export function inHandlings(messages) {
  const outer = scopes.getStore() ?? null;
  let scope = null;
  const ended = (how) => (value) => {
    if (scope !== null) scope.handling = null;
    return messages[how](value);
  };
  return {
    // No async function: the loop that calls it must be in the scope when it goes on.
    next() {
      const own = { handling: null, outer };
      scope = own;
      scopes.enterWith(own);
      return messages.next().then((found) => {
        own.handling = found.done ? null : found.value.handling;
        return found;
      });
    },
    return: ended("return"),
    throw: ended("throw"),
    [Symbol.asyncIterator]() {
      return this;
    },
    [Symbol.asyncDispose ?? Symbol("asyncDispose")]() {
      return this.return();
    },
  };
}

function presentHandling() {
  let scope = scopes.getStore() ?? null;
  while (scope !== null && scope.handling === null) scope = scope.outer;
  return scope?.handling ?? null;
}

function checkedKey(key) {
  if (typeof key === "string" && KEY.test(key)) return key;
  throw new UsageError(`key: ${String(key).slice(0, KEY_MOST)} is not 1 to ${KEY_MOST} visible ASCII characters`);
}

function sha256(text) {
  return createHash("sha256").update(text).digest("hex");
}
