// Strict JSON, and the canonical form of JSON that is signed. The rules are in the page
// docs/how-to/publish_from_another_language.md, the test vectors in ../vectors/canonical_json.json.

import { UsageError } from "./errors.js";

export const MAX_DEPTH = 64;
const INT_MIN = -(2n ** 63n);
const INT_MAX = 2n ** 63n - 1n;
const LONE_SURROGATE = /\p{Surrogate}/u;
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/y;
const PLAIN_TEXT = /[^"\\\u0000-\u001f]*/y;
const SPACE = /[ \t\n\r]*/y;
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };
const WORDS = [["true", true], ["false", false], ["null", null]];
const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** The text is not strict JSON. The message names the broken rule and quotes no input. */
export class MalformedJsonError extends UsageError {
  static reason = "malformed";
}

/**
 * A float whose value is a whole number, such as `1.0`. JavaScript's number 1 is an integer in JSON.
 *
 * Other numbers need no such object: `0.5` can only be a float.
 */
export class Float {
  /** @param {number} value a finite number */
  constructor(value) {
    if (!Number.isFinite(value)) throw new UsageError(`${value} is not JSON: a float must be finite`);
    this.value = value;
    Object.freeze(this);
  }

  valueOf() {
    return this.value;
  }

  toJSON() {
    return this.value;
  }
}

/**
 * Return a value as canonical JSON: equal values give equal text.
 *
 * A bigint is an integer. A number is an integer if it is whole and at most 2^53 - 1, else a float; a `Float` is a
 * float. A property whose value is undefined is left out. An object with `toJSON` is replaced by its result.
 *
 * @throws {UsageError} for a value that has no canonical form, such as NaN or a lone surrogate
 */
export function canonical(value) {
  return write(value, 0);
}

/** Return the bytes of `canonical(value)` in UTF-8. */
export function canonicalBytes(value) {
  return Buffer.from(canonical(value), "utf8");
}

function write(value, depth) {
  switch (typeof value) {
    case "string":
      return writeText(value);
    case "number":
      return writeNumber(value);
    case "bigint":
      if (value < INT_MIN || value > INT_MAX) throw new UsageError("an integer outside 64 bits is not taken");
      return String(value);
    case "boolean":
      return String(value);
    case "object":
      return value === null ? "null" : writeTree(value, depth + 1);
    default:
      throw new UsageError(`a ${typeof value} is not JSON`);
  }
}

function writeTree(value, depth) {
  if (value instanceof Float) return writeFloat(value.value);
  if (depth > MAX_DEPTH) throw new UsageError(`the value is nested deeper than ${MAX_DEPTH}, or contains itself`);
  if (typeof value.toJSON === "function") return write(value.toJSON(), depth);
  if (Array.isArray(value)) return `[${Array.from(value, (item) => write(item, depth)).join(",")}]`;
  if (value instanceof Map || value instanceof Set || ArrayBuffer.isView(value) || isBoxed(value)) {
    throw new UsageError(`a ${value.constructor.name} is not JSON: use an object, an array or text`);
  }
  const keys = Object.keys(value).filter((key) => value[key] !== undefined);
  keys.sort(byCodePoint);
  return `{${keys.map((key) => `${writeText(key)}:${write(value[key], depth)}`).join(",")}}`;
}

function isBoxed(value) {
  return value instanceof Number || value instanceof String || value instanceof Boolean;
}

function writeText(text) {
  if (LONE_SURROGATE.test(text)) throw new UsageError("a lone surrogate is not text that UTF-8 can encode");
  return JSON.stringify(text);
}

function writeNumber(number) {
  if (Number.isSafeInteger(number) && !Object.is(number, -0)) return String(number);
  if (!Number.isFinite(number)) throw new UsageError(`${number} is not JSON`);
  return writeFloat(number);
}

// As Python's repr: an exponent only below 1e-4 and from 1e16 on, with a sign and at least two digits.
function writeFloat(number) {
  if (number === 0) return Object.is(number, -0) ? "-0.0" : "0.0";
  const [mantissa, power] = Math.abs(number).toExponential().split("e");
  const [sign, digits, exponent] = [number < 0 ? "-" : "", mantissa.replace(".", ""), Number(power)];
  if (exponent < -4 || exponent >= 16) {
    const fraction = digits.length > 1 ? `.${digits.slice(1)}` : "";
    const shown = String(Math.abs(exponent)).padStart(2, "0");
    return `${sign}${digits[0]}${fraction}e${exponent < 0 ? "-" : "+"}${shown}`;
  }
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`;
  const whole = digits.slice(0, exponent + 1).padEnd(exponent + 1, "0");
  return `${sign}${whole}.${digits.slice(exponent + 1) || "0"}`;
}

/** Compare two texts by code point. JavaScript's own order is that of UTF-16 units. */
export function byCodePoint(a, b) {
  const length = Math.min(a.length, b.length);
  for (let at = 0; at < length; at += 1) {
    const [one, other] = [a.charCodeAt(at), b.charCodeAt(at)];
    if (one !== other) return rank(one) - rank(other);
  }
  return a.length - b.length;
}

// The units of a surrogate pair stand for a code point above all others.
function rank(unit) {
  return unit >= 0xd800 && unit <= 0xdfff ? unit + 0x10000 : unit;
}

/**
 * Parse strict JSON. It rejects duplicate keys, NaN, integers outside 64 bits, floats beyond the largest double,
 * nesting deeper than 64, lone surrogates and invalid UTF-8.
 *
 * An integer beyond 2^53 - 1 becomes a bigint, any other number a number.
 *
 * @param {Uint8Array | string} json
 * @param {{exact?: boolean}} [options] `exact`: a whole float such as `1.0` becomes a `Float`, so that `canonical`
 *   writes it as it was
 * @throws {MalformedJsonError}
 */
export function decode(json, { exact = false } = {}) {
  let text = json;
  if (typeof json !== "string") {
    try {
      text = UTF8.decode(json);
    } catch {
      throw new MalformedJsonError("not UTF-8");
    }
  }
  return new Parser(text, exact).document();
}

class Parser {
  #text;
  #exact;
  #at = 0;

  constructor(text, exact) {
    this.#text = text;
    this.#exact = exact;
  }

  document() {
    const value = this.#value(0);
    this.#skipSpace();
    if (this.#at < this.#text.length) throw this.#fault();
    return value;
  }

  #fault() {
    return new MalformedJsonError(`not JSON at character ${this.#at}`);
  }

  #match(pattern) {
    pattern.lastIndex = this.#at;
    const found = pattern.exec(this.#text);
    if (found !== null) this.#at = pattern.lastIndex;
    return found;
  }

  #skipSpace() {
    this.#match(SPACE);
  }

  #takes(sign) {
    this.#skipSpace();
    if (this.#text[this.#at] !== sign) return false;
    this.#at += 1;
    return true;
  }

  #expect(sign) {
    if (!this.#takes(sign)) throw this.#fault();
  }

  #value(depth) {
    this.#skipSpace();
    const first = this.#text[this.#at];
    if (first === '"') return this.#string();
    if (first === "{" || first === "[") {
      if (depth === MAX_DEPTH) throw new MalformedJsonError(`nested deeper than ${MAX_DEPTH}`);
      this.#at += 1;
      return first === "{" ? this.#object(depth + 1) : this.#array(depth + 1);
    }
    for (const [word, value] of WORDS) {
      if (this.#text.startsWith(word, this.#at)) {
        this.#at += word.length;
        return value;
      }
    }
    return this.#number();
  }

  #object(depth) {
    const [found, keys] = [{}, new Set()];
    if (this.#takes("}")) return found;
    do {
      this.#skipSpace();
      const key = this.#string();
      if (keys.has(key)) throw new MalformedJsonError("a key twice in one object");
      keys.add(key);
      this.#expect(":");
      // Not `found[key] = …`, which for the key `__proto__` would set the prototype.
      const value = this.#value(depth);
      Object.defineProperty(found, key, { value, writable: true, enumerable: true, configurable: true });
    } while (this.#takes(","));
    this.#expect("}");
    return found;
  }

  #array(depth) {
    const found = [];
    if (this.#takes("]")) return found;
    do found.push(this.#value(depth));
    while (this.#takes(","));
    this.#expect("]");
    return found;
  }

  #string() {
    if (this.#text[this.#at] !== '"') throw this.#fault();
    this.#at += 1;
    let found = "";
    for (;;) {
      found += this.#match(PLAIN_TEXT)[0];
      const sign = this.#text[this.#at];
      if (sign === '"') break;
      if (sign !== "\\") throw this.#fault();
      found += this.#escape();
    }
    this.#at += 1;
    if (LONE_SURROGATE.test(found)) throw new MalformedJsonError("a lone surrogate");
    return found;
  }

  #escape() {
    const sign = this.#text[this.#at + 1];
    if (sign === "u") {
      const digits = this.#text.slice(this.#at + 2, this.#at + 6);
      if (!/^[0-9a-fA-F]{4}$/.test(digits)) throw this.#fault();
      this.#at += 6;
      return String.fromCharCode(Number.parseInt(digits, 16));
    }
    if (sign === undefined || !Object.hasOwn(ESCAPES, sign)) throw this.#fault();
    this.#at += 2;
    return ESCAPES[sign];
  }

  #number() {
    const found = this.#match(NUMBER);
    if (found === null) throw this.#fault();
    const [literal, fraction, power] = found;
    if (fraction === undefined && power === undefined) {
      const number = literal.length > 20 ? null : BigInt(literal);
      if (number === null || number < INT_MIN || number > INT_MAX) {
        throw new MalformedJsonError("an integer outside 64 bits");
      }
      const short = Number(number);
      return Number.isSafeInteger(short) ? short : number;
    }
    const number = Number(literal);
    if (!Number.isFinite(number)) throw new MalformedJsonError("a number beyond the largest float");
    const isWhole = Number.isSafeInteger(number) && !Object.is(number, -0);
    return this.#exact && isWhole ? new Float(number) : number;
  }
}
