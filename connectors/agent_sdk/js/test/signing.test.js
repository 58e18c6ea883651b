import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import {
  contentId,
  decode,
  jobUser,
  mqttPassword,
  signedBytes,
  signedMessageBytes,
  signEvent,
  signEventText,
  signMessage,
  UsageError,
  verifyEvent,
} from "../trunkline_agent.js";

const vectors = JSON.parse(readFileSync(new URL("../../vectors/signing.json", import.meta.url)));

test("every event of the vectors gets its signature", () => {
  for (const { name, secret, event, signed, hmac_sig: signature } of vectors.events) {
    const fields = decode(event, { exact: true });
    assert.equal(signedBytes(fields).toString(), signed, name);
    const made = signEvent(fields, secret);
    assert.equal(made.data.hmac_sig, signature, name);
    assert.equal(verifyEvent(made, secret), true);
    assert.equal(verifyEvent(made, `${secret}x`), false);
    assert.equal(decode(signEventText(event, secret)).data.hmac_sig, signature, name);
  }
  assert.ok(vectors.events.length >= 10);
});

test("every message of the vectors gets its signature at the top", () => {
  for (const { name, secret, payload, signed, hmac_sig: signature } of vectors.messages) {
    const fields = decode(payload, { exact: true });
    assert.equal(signedMessageBytes(fields).toString(), signed, name);
    assert.equal(signMessage(fields, secret).hmac_sig, signature, name);
  }
  assert.ok(vectors.messages.length >= 6);
});

test("ids of content, MQTT users and passwords are those of Python", () => {
  for (const { parts, id } of vectors.content_ids) assert.equal(contentId(...parts), id);
  assert.equal(contentId(Buffer.from("a")), contentId("a"));
  for (const { job_id: jobId, secret, user, password } of vectors.mqtt_logins) {
    assert.equal(jobUser(jobId, secret), user);
    assert.equal(mqttPassword(secret, user), password);
  }
});

test("a signature that is missing or no text is wrong, and a event without data cannot be signed", () => {
  const event = { data: {} };
  for (const hmac_sig of [undefined, null, 1, "", "é".repeat(64), ["x"]]) {
    assert.equal(verifyEvent({ data: { hmac_sig } }, "secret"), false);
  }
  assert.equal(verifyEvent(event, "secret"), false);
  for (const data of [undefined, null, [], "x"]) assert.throws(() => signEvent({ data }, "secret"), UsageError);
  assert.deepEqual(event, { data: {} });
});
