import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { canonical, decode, Float, MalformedJsonError, UsageError } from "../trunkline_agent.js";

const { canonical: taken, refused, floats } = JSON.parse(
  readFileSync(new URL("../../vectors/canonical_json.json", import.meta.url)),
);

test("every document of the vectors has the canonical form that Python gives it", () => {
  for (const { name, json, canonical: expected } of taken) {
    assert.equal(canonical(decode(json, { exact: true })), expected, name);
    assert.equal(canonical(decode(Buffer.from(json), { exact: true })), expected, name);
    // The canonical form is its own canonical form.
    assert.equal(canonical(decode(expected, { exact: true })), expected, name);
  }
  assert.ok(taken.length > 20);
});

test("every refused document of the vectors is refused, and the error quotes no input", () => {
  for (const { name, hex } of refused) {
    assert.throws(() => decode(Buffer.from(hex, "hex")), MalformedJsonError, name);
  }
  assert.throws(() => decode('{"canary": 1, "canary": 2}'), (error) => !error.message.includes("canary"));
  assert.ok(refused.length > 40);
});

test("every float of the vectors is written as Python writes it", () => {
  for (const { double, text } of floats) {
    const number = Buffer.from(double, "hex").readDoubleBE();
    assert.equal(canonical(new Float(number)), text);
    assert.ok(Object.is(Number(text), number), text);
  }
  assert.ok(floats.length > 200);
});

test("a number is an integer if it is whole and safe, else a float; a bigint is an integer", () => {
  assert.equal(canonical([1, 2 ** 53 - 1, 2 ** 53, 0.5, -0, 10n ** 18n]), "[1,9007199254740991,9007199254740992.0,0.5,-0.0,1000000000000000000]");
  assert.deepEqual(decode("[9007199254740991, 9007199254740992, 1.0]"), [9007199254740991, 9007199254740992n, 1]);
  assert.ok(Object.is(decode("-0.0"), -0) && Object.is(decode("-0"), 0));
  const exact = decode("[1.0, 1.5]", { exact: true });
  assert.ok(exact[0] instanceof Float && exact[1] === 1.5);
  assert.equal(JSON.stringify(exact), "[1,1.5]");
  assert.equal(exact[0] + 1, 2);
});

test("values of JavaScript that are not JSON are refused or left out", () => {
  assert.equal(canonical({ a: undefined, at: new Date(0), b: Object.create({ c: 1 }) }), '{"at":"1970-01-01T00:00:00.000Z","b":{}}');
  const endless = [];
  endless.push(endless);
  const selfish = { toJSON: () => selfish };
  const bad = [NaN, Infinity, undefined, [undefined], () => 1, Symbol("x"), 2n ** 63n, -(2n ** 63n) - 1n, "\ud800", { "\udc00": 1 }];
  for (const value of [...bad, endless, selfish, new Map(), new Set(), new Uint8Array(1), Object("x"), JSON.parse("[".repeat(65) + "]".repeat(65))]) {
    assert.throws(() => canonical(value), UsageError);
  }
  assert.throws(() => new Float(NaN), UsageError);
});

test("a key named like the prototype stays a key", () => {
  const found = decode('{"__proto__": {"isAdmin": true}}');
  assert.equal(found.isAdmin, undefined);
  assert.deepEqual(Object.keys(found), ["__proto__"]);
});
