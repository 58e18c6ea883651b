import assert from "node:assert/strict";
import { chmodSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { inspect } from "node:util";

import { isPrivate } from "../lib/credentials.js";
import { Agent, Credentials, Job, UsageError } from "../trunkline_agent.js";

const { cases } = JSON.parse(readFileSync(new URL("../../vectors/private_files.json", import.meta.url)));

const CANARY = "canary-5d1c0e77";
const FIELDS = {
  schema_version: 1,
  name: "builder",
  hub: { url: "http://127.0.0.1:3200/", token: CANARY },
  mqtt: { host: "broker", port: 8883, tls: true, prefix: "agents", secret: CANARY },
  mcp: { url: "http://127.0.0.1:3100", private_key: CANARY },
  ca_certs: null,
};

function file(content, mode = 0o600) {
  const path = join(mkdtempSync(join(tmpdir(), "credentials-")), "builder.json");
  writeFileSync(path, typeof content === "string" ? content : JSON.stringify(content));
  chmodSync(path, mode);
  return path;
}

test("a file gives every door, and nothing that is printed shows a secret", () => {
  const found = Credentials.load(file(FIELDS));
  assert.deepEqual([found.name, found.hub.url, found.hub.token], ["builder", "http://127.0.0.1:3200", CANARY]);
  assert.deepEqual([found.mqtt.host, found.mqtt.port, found.mqtt.tls, found.mqtt.prefix, found.mqtt.secret], ["broker", 8883, true, "agents", CANARY]);
  assert.deepEqual([found.mcp.url, found.mcp.privateKey, found.caCerts], ["http://127.0.0.1:3100", CANARY, null]);
  assert.ok(!`${inspect(found, { depth: 9, showHidden: false })}${JSON.stringify(found)}`.includes(CANARY));
  assert.ok(!inspect(new Agent(null, found), { depth: 9 }).includes(CANARY));
  assert.ok(!inspect(new Job("0a1b2c3d", CANARY, { hub: found }), { depth: 9 }).includes(CANARY));
});

test("a section that is not there is null, and using its door names it", () => {
  const found = Credentials.load(file({ schema_version: 1, name: "builder" }));
  assert.deepEqual([found.hub, found.mqtt, found.mcp, found.caCerts], [null, null, null, null]);
  assert.throws(() => new Agent("builder", found), /section 'hub'/);
});

test("a file that others can read, or that has other content, is refused without its content", () => {
  assert.throws(() => Credentials.load(file(FIELDS, 0o640)), (error) => error instanceof UsageError && /chmod 600/.test(error.advice));
  assert.throws(() => Credentials.load("/nowhere/builder.json"), /ENOENT/);
  const bad = ["", "{", "[]", "null", CANARY, { ...FIELDS, schema_version: 2 }, { ...FIELDS, name: "../x" }];
  for (const content of [...bad, { ...FIELDS, hub: { url: "ftp://x", token: CANARY } }, { ...FIELDS, hub: { url: "http://x", token: `${CANARY} x` } }]) {
    assert.throws(() => Credentials.load(file(content)), (error) => error instanceof UsageError && !error.stack.includes(CANARY));
  }
});

test("each mode of the vectors is private or not", () => {
  for (const [mode, owner, user, expected] of cases) {
    assert.equal(isPrivate(parseInt(mode, 8), owner, user), expected, `${mode} ${owner} ${user}`);
  }
});

test("the environment names a file, or has the hub's address and a token", () => {
  assert.equal(Credentials.fromEnvironment({ TRUNKLINE_CREDENTIALS: file(FIELDS) }).name, "builder");
  const hub = { TRUNKLINE_HUB_URL: "https://hub.example.org", TRUNKLINE_AGENT_TOKEN: `${CANARY}\n` };
  const found = Credentials.fromEnvironment({ ...hub, TRUNKLINE_AGENT_NAME: "bo", TRUNKLINE_CA_CERTS: "ca.pem" });
  assert.deepEqual([found.name, found.hub.token, found.caCerts], ["bo", CANARY, "ca.pem"]);
  assert.throws(() => Credentials.fromEnvironment({ TRUNKLINE_HUB_URL: "http://x" }), /TRUNKLINE_AGENT_TOKEN/);
  assert.throws(() => Job.fromEnvironment({}, hub), /TRUNKLINE_JOB_ID/);
});
