import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { OutboxBusy, TrunklineError, UsageError } from "../trunkline_agent.js";
import { JobOutbox } from "../lib/outbox.js";

const JOB = "0a1b2c3d";
const MODULE = new URL("../lib/outbox.js", import.meta.url).href;
const folder = () => join(mkdtempSync(join(tmpdir(), "outbox-")), "state");
const bytes = (seq) => Buffer.from(`signed ${seq}`);
const stateOf = (dir) => JSON.parse(readFileSync(join(dir, `${JOB}.json`), "utf8"));

async function withOutbox(dir, action) {
  const outbox = await JobOutbox.open(dir, JOB, 5);
  try {
    return await action(outbox);
  } finally {
    await outbox.close();
  }
}

test("an event is on disk for its owner alone before add returns, in the form of the Python outbox", async () => {
  const dir = folder();
  await withOutbox(dir, async (outbox) => {
    const event = await outbox.add("started", bytes);
    assert.deepEqual(event, { seq: 1, payload: "signed 1", event: "started" });
    assert.deepEqual(stateOf(dir), { job_id: JOB, last_seq: 1, ended_seq: null, outbox: [event] });
    assert.equal(statSync(join(dir, `${JOB}.json`)).mode & 0o777, 0o600);
    assert.equal(statSync(dir).mode & 0o777, 0o700);
    await outbox.confirm(event);
    assert.deepEqual(stateOf(dir), { job_id: JOB, last_seq: 1, ended_seq: null, outbox: [] });
  });
  assert.deepEqual(readdirSync(dir).filter((name) => name.startsWith(".")), []);
});

test("the next process goes on counting, and gets the same bytes", async () => {
  const dir = folder();
  await withOutbox(dir, (outbox) => outbox.add("started", bytes));
  await withOutbox(dir, async (outbox) => {
    assert.deepEqual(outbox.pending.map(({ payload }) => payload), ["signed 1"]);
    assert.equal((await outbox.add("completed", bytes)).seq, 2);
    assert.equal(outbox.endedSeq, 2);
    await outbox.renew(({ seq }) => (seq === 1 ? Buffer.from("anew") : null));
    assert.deepEqual(stateOf(dir).outbox.map(({ payload }) => payload), ["anew", "signed 2"]);
    await outbox.confirm(outbox.pending[1], { rejected: true });
    assert.equal(outbox.endedSeq, null);
  });
});

test("an event that cannot be built takes no number", async () => {
  const dir = folder();
  await withOutbox(dir, async (outbox) => {
    const tooLong = () => {
      throw new UsageError("too long");
    };
    await assert.rejects(outbox.add("progress", tooLong), UsageError);
    assert.equal((await outbox.add("progress", bytes)).seq, 1);
  });
});

test("a second process waits for the lock, and gets OutboxBusy in the end", async () => {
  const dir = folder();
  const code = `const { JobOutbox } = await import(${JSON.stringify(MODULE)});
    await JobOutbox.open(${JSON.stringify(dir)}, "${JOB}", 5);
    console.log("locked");
    setInterval(() => {}, 1000);`;
  const other = spawn(process.execPath, ["--input-type=module", "--eval", code], { stdio: ["ignore", "pipe", "inherit"] });
  await once(other.stdout, "data");
  await assert.rejects(JobOutbox.open(dir, JOB, 0.3), OutboxBusy);
  // A process that is killed leaves no lock behind.
  const waiting = JobOutbox.open(dir, JOB, 10);
  other.kill("SIGKILL");
  await (await waiting).close();
});

test("without the program flock a file with the process id is the lock, and that of a dead process does not count", () => {
  const dir = folder();
  const code = `const { JobOutbox } = await import(${JSON.stringify(MODULE)});
    const { readFileSync, writeFileSync, existsSync } = await import("node:fs");
    const open = (limit = 5) => JobOutbox.open(${JSON.stringify(dir)}, "${JOB}", limit);
    const lock = ${JSON.stringify(join(dir, `${JOB}.lock.pid`))};
    const first = await open();
    if (Number(readFileSync(lock, "utf8")) !== process.pid) throw new Error("no lock");
    const error = await open(0.2).catch((found) => found);
    if (error.name !== "OutboxBusy") throw error;
    await first.close();
    if (existsSync(lock)) throw new Error("the lock is left");
    writeFileSync(lock, "${2 ** 22 + 1}");
    await (await open()).close();`;
  const environment = { ...process.env, PATH: "/nowhere" };
  const done = spawnSync(process.execPath, ["--input-type=module", "--eval", code], { env: environment, encoding: "utf8" });
  assert.equal(done.status, 0, done.stderr);
});

test("a file with other content is never overwritten", async () => {
  for (const content of ["", "{", "[]", '{"job_id": "11111111"}', `{"job_id": "${JOB}", "last_seq": -1}`, `{"job_id": "${JOB}", "outbox": [1]}`]) {
    const dir = folder();
    await withOutbox(dir, (outbox) => outbox.add("started", bytes));
    writeFileSync(join(dir, `${JOB}.json`), content);
    await assert.rejects(JobOutbox.open(dir, JOB, 1), (error) => error instanceof TrunklineError && error.reason === "outbox_damaged");
    assert.equal(readFileSync(join(dir, `${JOB}.json`), "utf8"), content);
  }
  await assert.rejects(JobOutbox.open(folder(), "../x", 1), UsageError);
});
