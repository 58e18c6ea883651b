// The HTTP proxy on the way to a hub, by the variables of the environment that curl reads.
//
// The library for Python follows the same rules: connectors/agent_sdk/trunkline_agent/hub/hub_address.py. Both are tested
// with `proxies` of ../vectors/hub.json.

import http from "node:http";
import https from "node:https";
import net from "node:net";
import tls from "node:tls";

import { UsageError } from "./errors.js";

const WITH_PORT = /^(\[[^\]]*\]|[^:]*):([0-9]+)$/;
const PRINTABLE = /[^\x20-\x7e]/g;

/**
 * Return the proxy for a server: `host`, `port`, `authorization` and `url` (without the login). Null: none.
 *
 * @param {URL} url the server's address
 */
export function proxyOf(url, environment = process.env) {
  const isTls = url.protocol === "https:";
  const host = url.hostname.replace(/^\[|\]$/g, "").replace(/\.+$/, "").toLowerCase();
  const port = Number(url.port) || (isTls ? 443 : 80);
  if (isLoopback(host)) return null;
  // A client of a CGI program sets HTTP_PROXY by a header.
  const plain = environment.REQUEST_METHOD === undefined ? ["http_proxy", "HTTP_PROXY"] : ["http_proxy"];
  const names = [...(isTls ? ["https_proxy", "HTTPS_PROXY"] : plain), "all_proxy", "ALL_PROXY"];
  const name = names.find((one) => environment[one] !== undefined);
  if (name === undefined || environment[name] === "" || isExcluded(host, port, environment)) return null;
  return addressOf(name, environment[name]);
}

/** A pool of TLS connections that a proxy makes. */
export class TunnelAgent extends https.Agent {
  #proxy;
  #connectS;

  constructor(proxy, connectS, options) {
    super(options);
    this.#proxy = proxy;
    this.#connectS = connectS;
  }

  createConnection(options, callback) {
    const { host, port } = options;
    const target = `${net.isIPv6(host) ? `[${host}]` : host}:${port}`;
    const { authorization } = this.#proxy;
    const asked = http.request({
      method: "CONNECT",
      host: this.#proxy.host,
      port: this.#proxy.port,
      path: target,
      headers: { Host: target, ...(authorization === null ? {} : { "Proxy-Authorization": authorization }) },
      agent: false,
    });
    const failed = new Error(`the proxy made no connection within ${this.#connectS} s`);
    const timer = setTimeout(() => asked.destroy(failed), 1000 * this.#connectS);
    const ended = (error, socket) => {
      clearTimeout(timer);
      callback(error, socket);
    };
    asked.once("connect", ({ statusCode: status, statusMessage: text }, socket) => {
      if (status >= 200 && status < 300) {
        ended(null, tls.connect({ ...options, socket }));
        return;
      }
      socket.destroy();
      ended(new Error(`the proxy refused CONNECT: ${status} ${text.replace(PRINTABLE, "?").slice(0, 100)}`));
    });
    asked.once("response", (response) => {
      response.destroy();
      ended(new Error(`the proxy refused CONNECT: ${response.statusCode}`));
    });
    asked.once("error", ended);
    asked.end();
  }
}

function addressOf(name, given) {
  let found = null;
  try {
    found = new URL(given.includes("://") ? given : `http://${given}`);
  } catch {
    // Reported below, without the address, which may have a password.
  }
  if (found === null || found.protocol !== "http:" || found.hostname === "") {
    throw new UsageError(`${name} in the environment is not the address of an HTTP proxy`, {
      advice: "it is like http://proxy.example:3128; NO_PROXY names the hosts that need none",
    });
  }
  const { hostname, username, password } = found;
  const port = Number(found.port) || 80;
  const login = `${decodeURIComponent(username)}:${decodeURIComponent(password)}`;
  const authorization = username === "" ? null : `Basic ${Buffer.from(login).toString("base64")}`;
  return { host: hostname.replace(/^\[|\]$/g, ""), port, authorization, url: `http://${hostname}:${port}` };
}

function isLoopback(host) {
  return host === "localhost" || host === "::1" || host.endsWith(".localhost") || isIn("127.0.0.0/8", host);
}

function isExcluded(host, port, environment) {
  const given = environment.no_proxy ?? environment.NO_PROXY ?? "";
  for (const entry of given.toLowerCase().split(/[\s,]+/).filter((one) => one !== "")) {
    const [, named, itsPort] = WITH_PORT.exec(entry) ?? [];
    if (itsPort !== undefined && Number(itsPort) !== port) continue;
    const name = (named ?? entry).replace(/^\[|\]$/g, "").replace(/^\*\./, "").replace(/^\.+|\.+$/g, "");
    if (name === "*" || name === host || host.endsWith(`.${name}`) || isIn(name, host)) return true;
  }
  return false;
}

function isIn(network, host) {
  const [address, bits] = network.split("/");
  const family = net.isIP(host);
  if (family === 0 || net.isIP(address) !== family) return false;
  const list = new net.BlockList();
  try {
    list.addSubnet(address, bits === undefined ? (family === 4 ? 32 : 128) : Number(bits), `ipv${family}`);
  } catch {
    return false;
  }
  return list.check(host, `ipv${family}`);
}
