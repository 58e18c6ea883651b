// Requests to the hub's HTTP API: repeated while the gateway is away, under the same idempotency key.

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import http from "node:http";
import https from "node:https";
import { setTimeout as pause } from "node:timers/promises";

import { errorOf, printable, retryAfterS } from "./answer_errors.js";
import { canonicalBytes, decode } from "./canonical_json.js";
import { BackboneUnreachable, RateLimited, TrunklineError, UsageError } from "./errors.js";
import { proxyOf, TunnelAgent } from "./proxy.js";

const API = "/api/hub";
export const PATIENCE_S = 30;
const CONNECT_S = 5;
// The next address of a host is tried after this time (RFC 8305, section 5).
const NEXT_ADDRESS = { autoSelectFamily: true, autoSelectFamilyAttemptTimeout: 250 };
const ANSWER_S = 45;
// The pause before another attempt is between half of it and all of it, at random. It doubles with each attempt.
const FIRST_PAUSE_S = 0.2;
const LONGEST_PAUSE_S = 3;
const NOT_A_GATEWAY = "check the address of the hub in the credentials";
const BODY_LIMIT = 128 * 1024 * 1024;
const CERTIFICATE = /CERT|SIGNATURE|ERR_TLS/;
// A longer timer would fire at once.
const LONGEST_MS = 2 ** 31 - 1;

/** Return a path of the API; each part is quoted. */
export function pathOf(...parts) {
  return [API, ...parts.map(encodeURIComponent)].join("/");
}

/** Wait, or throw the signal's reason as soon as it aborts. */
export async function sleep(seconds, signal) {
  signal?.throwIfAborted();
  try {
    await pause(Math.min(1000 * seconds, LONGEST_MS), undefined, { signal });
  } catch (error) {
    throw signal?.aborted ? signal.reason : error;
  }
}

/** Return the pause after so many failures before this one: half to all of a time that doubles, 3 s at most. */
export function backoffS(failures, firstS = FIRST_PAUSE_S, chance = Math.random()) {
  return Math.min(firstS * 2 ** failures, LONGEST_PAUSE_S) * (0.5 + chance / 2);
}

/** Return the error, for the caller to throw, of an answer whose fields are not those of a gateway. */
export function notAGateway() {
  const text = "the answer is not that of a Trunkline gateway";
  return new TrunklineError(text, { reason: "not_a_gateway", advice: NOT_A_GATEWAY });
}

/** The seconds of a clock that no one sets. */
export function now() {
  return performance.now() / 1000;
}

/** A client of one gateway with one token. It keeps connections open for further requests until `close`. */
export class HubClient {
  #access;
  #patienceS;
  #transport;
  #sockets;
  #base;
  #proxy;

  /**
   * @param {import("./credentials.js").HubAccess} access
   * @param {{caCerts?: string | null, patienceS?: number}} [options] `patienceS`: how long a failing request is
   *   repeated
   */
  constructor(access, { caCerts = null, patienceS = PATIENCE_S } = {}) {
    this.#access = access;
    this.#patienceS = patienceS;
    this.#base = new URL(access.url);
    this.#proxy = proxyOf(this.#base);
    this.#transport = this.#base.protocol === "https:" ? https : http;
    const trust = caCerts === null || this.#transport === http ? {} : { ca: authority(caCerts) };
    const options = { keepAlive: true, ...NEXT_ADDRESS, ...trust };
    const isTunnel = this.#proxy !== null && this.#transport === https;
    this.#sockets = isTunnel
      ? new TunnelAgent(this.#proxy, CONNECT_S, options)
      : new this.#transport.Agent(options);
  }

  /** Close the connections that no request uses. Others close when their request has ended. */
  close() {
    this.#sockets.destroy();
  }

  /** Send a GET request and return the JSON of the answer. */
  async get(path, options = {}) {
    return this.decoded(await this.request("GET", path, options));
  }

  /** Send a POST request with a JSON body and return the JSON of the answer, and its verdict as `verdict`. */
  async post(path, fields = {}, { key, ...options } = {}) {
    const headers = { "Idempotency-Key": key ?? randomUUID(), ...options.headers };
    const answer = await this.request("POST", path, { ...options, headers, json: fields });
    return { verdict: answer.headers["trunkline-verdict"] ?? null, ...this.decoded(answer) };
  }

  /**
   * Send a request, and return the gateway's answer: `status`, `headers` and the bytes `body`.
   *
   * It is sent again on a lost connection and on the statuses 408, 429, 502, 503 and 504, with pauses that grow to
   * 3 s, or of `Retry-After`, until it has failed for `patienceS`.
   *
   * @throws {TrunklineError} the error that belongs to the status of the answer
   */
  async request(method, path, options = {}) {
    const { signal, patienceS = this.#patienceS, isAnswer = isSuccess } = options;
    const job = this.#prepared(method, path, options);
    let failingSince = null;
    for (let attempt = 0; ; attempt += 1) {
      signal?.throwIfAborted();
      let [problem, pauseS] = [null, backoffS(attempt)];
      try {
        const answer = await whole(await this.#send(job), job);
        if (isAnswer(answer)) return answer;
        problem = errorOf(answer, options);
        pauseS = Math.max(pauseS, retryAfterS(answer.headers) ?? 0);
      } catch (error) {
        if (signal?.aborted) throw signal.reason;
        if (error instanceof UsageError) throw error;
        problem = this.unreachable(error);
      }
      failingSince ??= now();
      const isFinal = problem.isFinal || !(problem instanceof BackboneUnreachable || problem instanceof RateLimited);
      if (isFinal || now() + pauseS - failingSince >= patienceS) throw problem;
      await sleep(pauseS, signal);
    }
  }

  /** Send a request once, and return the answer as a stream as soon as its headers are there. */
  async stream(method, path, options = {}) {
    const { signal } = options;
    let response;
    try {
      response = await this.#send(this.#prepared(method, path, options));
      if (response.statusCode === 200) return response;
      const answer = await whole(response, { answerS: CONNECT_S });
      throw errorOf(answer, options);
    } catch (error) {
      if (signal?.aborted) throw signal.reason;
      throw error instanceof TrunklineError ? error : this.unreachable(error);
    }
  }

  /** Return the error that the gateway does not answer. */
  unreachable(cause) {
    if (cause instanceof TrunklineError) return cause;
    const code = String(cause?.code ?? "");
    const why = printable(cause?.message || code || String(cause));
    const by = this.#proxy === null ? "" : ` by the proxy ${this.#proxy.url}`;
    const text = `the gateway at ${this.#base.origin} does not answer${by} (${why})`;
    const error = new BackboneUnreachable(text, { cause });
    if (CERTIFICATE.test(code)) {
      error.advice = "the credentials' ca_certs must be the authority that signed the gateway's certificate";
      Object.defineProperty(error, "isFinal", { value: true });
    }
    return error;
  }

  /** Return the JSON of an answer. */
  decoded(answer) {
    try {
      return decode(answer.body);
    } catch {
      // Perhaps a number that only another door takes.
    }
    try {
      return JSON.parse(answer.body.toString("utf8"));
    } catch {
      throw notAGateway();
    }
  }

  #prepared(method, path, { query = {}, json, open, bytes, headers = {}, waitS = 0, signal }) {
    const url = new URL(this.#base);
    url.pathname = url.pathname.replace(/\/$/, "") + path;
    for (const [name, value] of Object.entries(query)) {
      if (value !== undefined && value !== null) url.searchParams.set(name, String(value));
    }
    const content = json === undefined ? bytes : canonicalBytes(json);
    const sent = { Authorization: `Bearer ${this.#access.token}`, ...headers };
    if (json !== undefined) sent["Content-Type"] = "application/json";
    if (content !== undefined) sent["Content-Length"] = content.length;
    return { method, url, headers: sent, content, open, signal, answerS: ANSWER_S + waitS };
  }

  // A proxy of plain HTTP is asked for the whole address (RFC 9112, section 3.2.2).
  #addressed(url, options) {
    if (this.#proxy === null || this.#transport === https) return [url, options];
    const { host, port, authorization } = this.#proxy;
    const login = authorization === null ? {} : { "Proxy-Authorization": authorization };
    const headers = { ...options.headers, Host: url.host, ...login };
    return [{ ...options, host, port, path: url.href, headers }];
  }

  #send({ method, url, headers, content, open, signal, answerS }) {
    return new Promise((resolve, reject) => {
      let request;
      try {
        const options = { method, headers, signal, agent: this.#sockets };
        request = this.#transport.request(...this.#addressed(url, options));
      } catch (error) {
        reject(new UsageError(`the request cannot be sent: ${error.message}`, { cause: error }));
        return;
      }
      const timer = setTimeout(() => request.destroy(new Error(`no answer within ${answerS} s`)), 1000 * answerS);
      const ended = (settle) => (value) => {
        clearTimeout(timer);
        settle(value);
      };
      request.on("socket", (socket) => limitConnecting(socket, request));
      request.on("response", ended(resolve));
      request.on("error", ended(reject));
      if (open === undefined) {
        request.end(content);
      } else {
        open().on("error", (error) => request.destroy(error)).pipe(request);
      }
    });
  }
}

function limitConnecting(socket, request) {
  if (!socket.connecting) return;
  const timer = setTimeout(() => request.destroy(new Error(`no connection within ${CONNECT_S} s`)), 1000 * CONNECT_S);
  const done = () => clearTimeout(timer);
  socket.once("connect", done).once("close", done);
}

async function whole(response, { answerS }) {
  const timer = setTimeout(() => response.destroy(new Error(`no whole answer within ${answerS} s`)), 1000 * answerS);
  try {
    let [size, parts] = [0, []];
    for await (const part of response) {
      size += part.length;
      if (size > BODY_LIMIT) throw new Error("the answer is too long");
      parts.push(part);
    }
    return { status: response.statusCode, headers: response.headers, body: Buffer.concat(parts) };
  } finally {
    clearTimeout(timer);
  }
}

function isSuccess(answer) {
  return answer.status >= 200 && answer.status < 300;
}

function authority(path) {
  try {
    return readFileSync(path);
  } catch (error) {
    throw new UsageError(`ca_certs: cannot read ${path}: ${error.code}`, { cause: error });
  }
}
