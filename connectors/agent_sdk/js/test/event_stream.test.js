import assert from "node:assert/strict";
import { test } from "node:test";

import { parseEvents, pauseAfter } from "../lib/event_stream.js";

async function* stream(parts) {
  yield* parts;
}

async function eventsOf(parts, most) {
  const found = [];
  for await (const event of parseEvents(stream(parts), most)) found.push(event);
  return found;
}

test("events are the same however the stream is cut into parts, with each end of a line", async () => {
  for (const end of ["\n", "\r\n", "\r"]) {
    const text = [": ping", "", "event: a", "id: 1", 'data: {"x":', "data:1}", "", "data: 2", "", "", "id: 3", "", ""];
    const whole = text.join(end) + "\n";
    const expected = [
      { name: "a", id: "1", data: { x: 1 } },
      { name: "message", id: "1", data: 2 },
    ];
    for (let size = 1; size <= whole.length; size += 1) {
      const parts = whole.match(new RegExp(`[^]{1,${size}}`, "g"));
      assert.deepEqual(await eventsOf(parts), expected, `${JSON.stringify(end)} in parts of ${size}`);
    }
  }
});

test("an event of many lines without an end has the bound of one line without an end", async () => {
  for (const part of ["data: x\n", "data:\n", "x", ":\n"]) {
    let parts = 0;
    async function* endless() {
      for (; parts < 10_000; parts += 1) yield part;
    }
    await assert.rejects(async () => {
      for await (const event of parseEvents(endless(), 1000)) assert.fail(event);
    }, /more than 1000 characters/);
    assert.ok(parts * part.length <= 1010, `${parts} parts of ${JSON.stringify(part)}`);
  }
});

test("events and pings without an end pass a bound that each of them keeps", async () => {
  const parts = Array.from({ length: 100 }, (_, n) => `: ping\n\ndata: ${n}\n\n`);
  assert.equal((await eventsOf(parts, 20)).length, 100);
});

test("a line in many parts takes time in proportion to its length", async () => {
  const timeOf = async (count) => {
    const parts = ['data: "', ...Array(count).fill("x".repeat(1024)), '"\n\n'];
    const began = process.cpuUsage();
    assert.equal((await eventsOf(parts))[0].data.length, 1024 * count);
    const spent = process.cpuUsage(began);
    return spent.user + spent.system;
  };
  await timeOf(500);
  const [short, long] = [await timeOf(1000), await timeOf(8000)];
  assert.ok(long < 24 * short + 100_000, `${short} and ${long} microseconds`);
});

test("readers come back at random times, and none before Retry-After", () => {
  const pauses = Array.from({ length: 1000 }, () => pauseAfter(0, 0));
  const tenths = new Set(pauses.map((pause) => Math.floor(10 * pause)));
  assert.ok(tenths.size >= 3, `${[...tenths]}`);
  const [first, later] = [pauseAfter(0, 0, 1), pauseAfter(9, 0, 1)];
  assert.ok(Math.max(...pauses) <= first && first < later && later <= 5);
  const told = Array.from({ length: 1000 }, () => pauseAfter(0, 30));
  assert.ok(Math.min(...told) >= 30 && Math.max(...told) <= 36 && new Set(told).size > 900);
});
