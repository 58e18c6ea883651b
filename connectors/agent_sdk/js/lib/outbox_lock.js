// A lock on a file between processes. Node has no call for flock(2), which the Python outbox uses. The program
// flock(1) takes the same lock and ends with this process, even if this one is killed. Without that program, a file
// with the process id is the lock.

import { spawn } from "node:child_process";
import { open, readFile, rename, unlink } from "node:fs/promises";
import { once } from "node:events";

import { OutboxBusy, TrunklineError } from "./errors.js";
import { now, sleep } from "./hub_client.js";

const TICK_S = 0.05;
const HOLD = "echo locked; exec cat";
let hasProgram = process.platform !== "win32";

/**
 * Lock a file, and return a function that unlocks it.
 *
 * @param {string} path the lock file, which is made if it is missing
 * @param {number} timeoutS how long to wait for another process
 * @param {string} busy what the other process does, for the error
 * @throws {OutboxBusy}
 */
export async function locked(path, timeoutS, busy) {
  await (await open(path, "a", 0o600)).close();
  if (hasProgram) {
    const unlock = await lockedByProgram(path, timeoutS, busy);
    if (unlock !== null) return unlock;
    hasProgram = false;
  }
  return lockedByPid(`${path}.pid`, timeoutS, busy);
}

async function lockedByProgram(path, timeoutS, busy) {
  // A process group of its own: Ctrl-C must not end the lock before this process.
  const stdio = ["pipe", "pipe", "ignore"];
  const env = { PATH: process.env.PATH };
  const child = spawn("flock", ["-x", path, "sh", "-c", HOLD], { stdio, env, detached: true });
  const ended = new Promise((resolve) => {
    child.once("error", resolve).once("exit", (code, signal) => resolve(new Error(`it ended: ${signal ?? code}`)));
  });
  child.stdin.on("error", () => {});
  const timer = new AbortController();
  const late = sleep(timeoutS, timer.signal).then(() => "late", () => "late");
  const got = await Promise.race([once(child.stdout, "data").then(() => true), ended, late]);
  timer.abort();
  if (got === true) {
    // The lock alone does not keep this process running.
    for (const one of [child, child.stdin, child.stdout]) one.unref();
    return async () => {
      child.ref();
      child.stdin.end();
      await ended;
    };
  }
  if (got instanceof Error) {
    if (got.code === "ENOENT") return null;
    throw new TrunklineError(`the program flock cannot lock ${path}: ${got.message}`, { cause: got });
  }
  child.stdin.end();
  process.kill(-child.pid);
  throw tooLate(timeoutS, busy);
}

async function lockedByPid(path, timeoutS, busy) {
  const deadline = now() + timeoutS;
  for (;;) {
    try {
      const file = await open(path, "wx", 0o600);
      await file.writeFile(String(process.pid));
      await file.close();
      return () => unlink(path);
    } catch (error) {
      if (error.code !== "EEXIST") throw error;
    }
    await removeStale(path);
    if (now() > deadline) throw tooLate(timeoutS, busy);
    await sleep(TICK_S);
  }
}

async function removeStale(path) {
  const pid = Number(await readFile(path, "utf8").catch(() => ""));
  if (pid === 0 || isAlive(pid)) return;
  // Of several processes that see the dead one, the first moves its file away. A file that another process has made
  // meanwhile is put back.
  const aside = `${path}.${process.pid}`;
  await rename(path, aside).catch(() => {});
  const moved = Number(await readFile(aside, "utf8").catch(() => ""));
  await (moved === pid || moved === 0 ? unlink(aside) : rename(aside, path)).catch(() => {});
}

function isAlive(pid) {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return error.code !== "ESRCH";
  }
}

function tooLate(timeoutS, busy) {
  return new OutboxBusy(`${busy} for more than ${timeoutS} s`);
}
