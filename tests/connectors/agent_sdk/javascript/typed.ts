// A program that uses each name of the library as its types describe it. TypeScript checks it; nothing runs it.

import {
  Agent,
  canonical,
  Credentials,
  decode,
  Delegator,
  errors,
  Float,
  HubAccess,
  Job,
  LeaseLost,
  signEvent,
  type Json,
  type Message,
  type Receipt,
  type WatchedEvent,
} from "trunkline-agent";

export async function use(secret: string): Promise<Json> {
  const credentials = Credentials.load("builder.json");
  await using agent = new Agent("builder", credentials, { patienceS: 5 });
  const stop = new AbortController();
  for await (const message of agent.messages({ leaseS: 60, signal: stop.signal })) {
    const length: number = await message.handle(async ({ payload, blobInfo }: Message) => {
      if (blobInfo !== null) return (await message.blob()).length;
      await message.reply({ text: String(payload) }, { priority: "high" });
      return 0;
    });
    if (length > 7) await message.nack("too long");
  }
  const blob = await agent.upload(new Uint8Array(3), { contentType: "image/png" });
  const { messageId } = await agent.send("planner", "report", { n: 2n ** 60n, f: new Float(1) }, { blob });
  const answer: Message = await agent.ask("planner", "ask", [1, 2], { timeoutS: 3, thread: "t" });
  await agent.schedule("nightly", "planner", "tick", {}, { cron: "0 3 * * *" });
  const schedules: (string | null)[] = (await agent.schedules()).map(({ name, cron }) => cron && name);
  await (await agent.receive({ waitS: 3 }))?.ack();
  const [first] = await agent.discover();
  const job = new Job("0a1b2c3d", secret, { hub: new HubAccess("http://127.0.0.1:3200", secret) });
  const receipt: Receipt = await job.progress("1/2", { done: 1 });
  const outcome: string = await job.run(async (one) => one.id);
  await using delegator = new Delegator(credentials);
  const submitted = await delegator.submit({ description: outcome, broker: { host: "broker", port: 8883, tls: true } });
  for await (const event of delegator.watch(submitted.jobId, { idleTimeoutS: 60 })) {
    const seen: WatchedEvent = event;
    if (seen.isEnd) await delegator.cancel(seen.jobId, { reason: "over" });
  }
  try {
    signEvent({ event: "started", data: {} }, secret).data.hmac_sig.toUpperCase();
  } catch (error) {
    if (error instanceof errors.RateLimited) return error.retryAfterS;
    if (error instanceof LeaseLost || error instanceof errors.EventRejected) return error.reason;
  }
  // @ts-expect-error a priority is one of three words
  await agent.send("planner", "note", {}, { priority: "urgent" });
  // @ts-expect-error a message has no setter for its payload
  answer.payload = 1;
  return [canonical(decode("{}")), messageId, ...schedules, receipt.position?.offset ?? null, first?.name ?? null];
}
