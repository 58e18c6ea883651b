// A server with a certificate of the test's own authority, in the place of a gateway with TLS.

import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createServer } from "node:https";
import { join } from "node:path";
import { test } from "node:test";

import { Agent, Credentials, errors } from "trunkline-agent";

const file = (name) => join(process.env.TLS_FOLDER, name);

test("the authority of the credentials is trusted, and no other", async (t) => {
  const tls = { key: readFileSync(file("server.key")), cert: readFileSync(file("server.crt")) };
  const server = createServer(tls, (_request, response) => response.end('{"participants": []}'));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => server.close());
  const hub = { url: `https://127.0.0.1:${server.address().port}`, token: "token" };
  const trusting = new Agent(null, new Credentials({ hub, caCerts: file("ca.crt") }));
  assert.deepEqual(await trusting.discover(), []);
  await trusting.close();
  const begin = performance.now();
  for (const caCerts of [null, file("other.crt")]) {
    const agent = new Agent(null, new Credentials({ hub, caCerts }));
    const error = await agent.discover().then(assert.fail, (found) => found);
    assert.ok(error instanceof errors.BackboneUnreachable);
    assert.match(error.advice, /ca_certs/);
    await agent.close();
  }
  // Trying again would not help.
  assert.ok(performance.now() - begin < 5000);
  assert.throws(() => new Agent(null, new Credentials({ hub, caCerts: "/nowhere/ca.crt" })), errors.UsageError);
});
