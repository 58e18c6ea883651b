// Sends a job's events over MQTT 5 with the package `mqtt` from npm, and waits for the receipt of each.
//
// Each delivery uses a new connection. A receipt is found by its `ce_id` alone: anybody who can publish can copy a
// seq.

import { readFileSync } from "node:fs";

import { BackboneUnreachable, ReceiptMissing, Refused, UsageError } from "./errors.js";
import { receipt } from "./http_delivery.js";
import { backoffS, now, sleep } from "./hub_client.js";
import { TERMINAL_EVENTS } from "./job_event.js";
import { contentId, jobUser, mqttPassword } from "./signing.js";

const ATTEMPTS = 3;
const CONNECT_S = 10;
const RECEIPT_S = 10;
const PACKET_S = 5;
const AGAIN_S = 0.5;
const REFUSED_AGAIN_S = 2;
const FIRST_PAUSE_S = 0.5;
const RETAINED_S = 7 * 24 * 3600;
// Reason codes of MQTT 5.
const NO_SUBSCRIBER = 0x10;
const BAD_LOGIN = [0x86, 0x87];
const NOT_AUTHORIZED = 0x87;
const FINAL = [0x86, 0x87, 0x8a, 0x8c];

class NoAccount extends Refused {}

/** The way of a job's events over MQTT. An event without a receipt stays in the outbox. */
export class MqttDelivery {
  #broker;
  #jobId;
  #secret;

  /**
   * @param {object} broker `host`, `port`, `tls`, `topicPrefix`, `username`, `password`, `caCerts`, `certfile`,
   *   `keyfile`, `attempts`, `connectS`, `receiptS`; all have defaults
   */
  constructor(broker, jobId, secret) {
    this.#broker = { attempts: ATTEMPTS, connectS: CONNECT_S, receiptS: RECEIPT_S, ...broker };
    this.#jobId = jobId;
    this.#secret = secret;
  }

  /** Send events in order. `confirmed(event, receipt)` is awaited after each, whatever its verdict. */
  async deliver(events, confirmed, signal) {
    const { connectAsync } = await packageFromNpm();
    const left = [...events];
    const { attempts } = this.#broker;
    for (let attempt = 1; ; attempt += 1) {
      signal?.throwIfAborted();
      try {
        await this.#deliverOnce(connectAsync, left, confirmed, signal);
        return;
      } catch (error) {
        const again = error instanceof NoAccount || error instanceof BackboneUnreachable;
        if (!again || error instanceof ReceiptMissing || attempt >= attempts) throw error;
      }
      await sleep(backoffS(attempt - 1, FIRST_PAUSE_S), signal);
    }
  }

  close() {}

  async #deliverOnce(connectAsync, left, confirmed, signal) {
    const connection = await this.#connected(connectAsync);
    const stop = () => connection.client.end(true);
    signal?.addEventListener("abort", stop, { once: true });
    try {
      await this.#subscribe(connection);
      for (; left.length > 0; left.shift()) await confirmed(left[0], await this.#send(connection, left[0]));
      await answered(connection.client.endAsync(), "end").catch(() => connection.client.end(true));
    } catch (error) {
      connection.client.end(true);
      throw signal?.aborted ? signal.reason : error;
    } finally {
      signal?.removeEventListener("abort", stop);
    }
  }

  async #connected(connectAsync) {
    const { host = "127.0.0.1", port = 1883, tls = false, connectS } = this.#broker;
    const username = this.#broker.username ?? jobUser(this.#jobId, this.#secret);
    const password = this.#broker.password ?? mqttPassword(this.#secret, username);
    const options = { host, port, protocol: tls ? "mqtts" : "mqtt", username, password, ...certificates(this.#broker) };
    const fixed = { protocolVersion: 5, clean: true, reconnectPeriod: 0, connectTimeout: 1000 * connectS };
    let client;
    try {
      client = await connectAsync({ ...options, ...fixed }, undefined, false);
    } catch (error) {
      if (BAD_LOGIN.includes(error.code)) {
        throw new NoAccount(`${this.#name()} does not let user '${username}' in`, {
          reason: "no_account",
          advice: "the gateway makes a job's account at its registration and removes it some time after its end",
          cause: error,
        });
      }
      throw this.#problem(error, "the connection");
    }
    const connection = { client, receipts: new Map(), wake: () => {}, lost: false };
    client.on("message", (_topic, payload) => {
      const found = readReceipt(payload);
      if (found !== null) connection.receipts.set(found.ceId, found);
      connection.wake();
    });
    // The package drops a packet that it cannot read, and with it the packets behind it. A new connection gets them.
    for (const end of ["error", "close"]) {
      client.on(end, () => {
        connection.lost = true;
        connection.wake();
      });
    }
    return connection;
  }

  async #subscribe({ client }) {
    try {
      await answered(client.subscribeAsync(this.#topic("receipts"), { qos: 1 }), "SUBACK");
    } catch (error) {
      throw this.#problem(error, "reading the job's receipts");
    }
  }

  async #send(connection, event) {
    const topic = this.#topic("events");
    const bytes = Buffer.from(event.payload, "utf8");
    const ceId = contentId(topic, bytes);
    const deadline = now() + this.#broker.receiptS;
    connection.receipts.clear();
    for (;;) {
      const code = await this.#publish(connection, topic, bytes, TERMINAL_EVENTS.includes(event.event));
      if (code === NOT_AUTHORIZED && now() + REFUSED_AGAIN_S < deadline) {
        await sleep(REFUSED_AGAIN_S); // the broker pauses an account that publishes far too much
        continue;
      }
      if (FINAL.includes(code)) throw this.#problem({ code }, "publishing this job's events");
      // The bridge connects to a job's own broker some seconds after the registration.
      const again = code === NO_SUBSCRIBER && deadline - now() > AGAIN_S;
      const found = await waitReceipt(connection, ceId, again ? now() + AGAIN_S : deadline);
      if (found !== null) return found;
      if (connection.lost) throw this.#problem(new Error("connection lost"), "publishing");
      if (!again) {
        const text = `no receipt within ${this.#broker.receiptS} s: the broker has seq ${event.seq}, which stays in the outbox`;
        throw new ReceiptMissing(text);
      }
    }
  }

  async #publish({ client }, topic, bytes, retain) {
    try {
      // A retained end would stay for ever at a broker that is not the stack's own.
      const properties = retain ? { messageExpiryInterval: RETAINED_S } : {};
      const puback = await answered(client.publishAsync(topic, bytes, { qos: 1, retain, properties }), "PUBACK");
      return puback?.reasonCode ?? 0;
    } catch (error) {
      if (error.code === NOT_AUTHORIZED) return NOT_AUTHORIZED;
      throw this.#problem(error, "publishing this job's events");
    }
  }

  #problem(error, what) {
    if (FINAL.includes(error.code)) {
      return new Refused(`${this.#name()} refuses ${what}: reason 0x${error.code.toString(16)}`, { cause: error });
    }
    const why = error.message || error.code || "it does not answer";
    return new BackboneUnreachable(`${this.#name()}: ${what}: ${why}`, { cause: error });
  }

  #topic(end) {
    return `${this.#broker.topicPrefix ?? "python/mqtt/jobs"}/${this.#jobId}/${end}`;
  }

  #name() {
    return `MQTT broker ${this.#broker.host ?? "127.0.0.1"}:${this.#broker.port ?? 1883}`;
  }
}

// Wait for the broker's answer to a packet. The caller gives the connection up after an error.
async function answered(promise, what) {
  let timer;
  const late = new Promise((_resolve, reject) => {
    timer = setTimeout(() => reject(new Error(`no ${what} within ${PACKET_S} s`)), 1000 * PACKET_S);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

async function packageFromNpm() {
  try {
    const found = await import("mqtt");
    return found.default ?? found;
  } catch (error) {
    if (error.code !== "ERR_MODULE_NOT_FOUND") throw error;
    throw new UsageError("events over MQTT need the package 'mqtt'", { advice: "run: npm install mqtt@5" });
  }
}

function certificates({ tls, caCerts, certfile, keyfile }) {
  if (!tls) return {};
  const read = (path) => (path === undefined || path === null ? undefined : readFileSync(path));
  try {
    return { ca: read(caCerts), cert: read(certfile), key: read(keyfile ?? certfile) };
  } catch (error) {
    throw new UsageError(`the broker's certificates: ${error.message}`, { cause: error });
  }
}

/** Read a job event's receipt from an MQTT payload; null for any other payload. */
export function readReceipt(payload) {
  try {
    const { ce_id: ceId, seq = null, verdict = null, reason = null, position = null } = JSON.parse(payload);
    return typeof ceId === "string" ? receipt(ceId, seq, verdict, reason, position) : null;
  } catch {
    return null;
  }
}

async function waitReceipt(connection, ceId, deadline) {
  while (!connection.receipts.has(ceId) && !connection.lost && now() < deadline) {
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, 1000 * Math.max(0, deadline - now()));
      connection.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
  return connection.receipts.get(ceId) ?? null;
}
