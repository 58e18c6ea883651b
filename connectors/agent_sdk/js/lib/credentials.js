// The credentials of an agent: its name, and how it reaches each door. They come from a file or the environment.

import { closeSync, fstatSync, openSync, readFileSync, statSync } from "node:fs";
import { inspect } from "node:util";

import { decode } from "./canonical_json.js";
import { UsageError } from "./errors.js";
import { isName } from "./job_event.js";

const TOKEN = /^[\x21-\x7e]+$/;
const ROOT = 0;
const MOUNTED =
  "a mounted secret must be root's, with mode 0440 or less and a group of this process; in Kubernetes by " +
  "defaultMode 0440 and fsGroup";

// Secrets are not enumerable, so neither console.log nor JSON.stringify shows them.
class Access {
  constructor(fields, secrets) {
    Object.assign(this, fields);
    for (const [name, value] of Object.entries(secrets)) Object.defineProperty(this, name, { value });
    Object.freeze(this);
  }

  [inspect.custom](_depth, options) {
    return `${this.constructor.name} ${inspect({ ...this }, options)}`;
  }
}

/** The address of the hub's HTTP API, and a token. */
export class HubAccess extends Access {
  constructor(url, token) {
    if (!isHttpUrl(url)) throw new UsageError("hub.url: expected http://host:port");
    if (typeof token !== "string" || !TOKEN.test(token)) throw new UsageError("hub.token holds no token");
    super({ url: url.replace(/\/+$/, "") }, { token });
  }
}

/** The MQTT broker, and the agent's secret there. */
export class MqttAccess extends Access {
  constructor({ host = "127.0.0.1", port = 1883, tls = false, prefix = "python/mqtt/agents", secret = null } = {}) {
    super({ host, port, tls, prefix }, { secret });
  }
}

/** The MCP server, and the private key that signs the agent's requests. This library does not speak MCP. */
export class McpAccess extends Access {
  constructor({ url, private_key: privateKey = null }) {
    super({ url }, { privateKey });
  }
}

/** The credentials of one agent. A door that they do not have is null. Printing them shows no secret. */
export class Credentials {
  /** @param {{name?: string|null, hub?: object|null, mqtt?: object|null, mcp?: object|null, caCerts?: string|null}} parts */
  constructor({ name = null, hub = null, mqtt = null, mcp = null, caCerts = null } = {}) {
    if (name !== null && !isName(name)) throw new UsageError(`not an agent's name: ${JSON.stringify(name)}`);
    this.name = name;
    this.hub = hub === null || hub instanceof HubAccess ? hub : new HubAccess(hub.url, hub.token);
    this.mqtt = mqtt === null || mqtt instanceof MqttAccess ? mqtt : new MqttAccess(mqtt);
    this.mcp = mcp === null || mcp instanceof McpAccess ? mcp : new McpAccess(mcp);
    this.caCerts = caCerts;
    Object.freeze(this);
  }

  /**
   * Read credentials from a JSON file that only its owner may read.
   *
   * `./trunkline agents join NAME --credentials FILE` writes such a file.
   *
   * @param {string} path
   * @throws {UsageError} the file is missing, invalid or readable by others
   */
  static load(path) {
    let bytes;
    try {
      bytes = readPrivate(path);
    } catch (error) {
      if (error instanceof UsageError) throw error;
      throw new UsageError(`cannot read ${path}: ${error.code}`, { cause: error });
    }
    let fields;
    try {
      fields = decode(bytes);
    } catch {
      fields = null;
    }
    if (fields === null || typeof fields !== "object" || fields.schema_version !== 1) {
      throw new UsageError(`${path} does not hold an agent's credentials of version 1`);
    }
    try {
      return new Credentials({ ...fields, caCerts: fields.ca_certs ?? null });
    } catch (error) {
      throw new UsageError(`${path}: ${error.message}`, { reason: error.reason });
    }
  }

  /**
   * Read credentials from environment variables: TRUNKLINE_CREDENTIALS is the path of a file. Without it,
   * TRUNKLINE_HUB_URL and TRUNKLINE_AGENT_TOKEN give the hub, TRUNKLINE_AGENT_NAME and TRUNKLINE_CA_CERTS the rest.
   *
   * @param {Record<string, string | undefined>} [environment]
   */
  static fromEnvironment(environment = process.env) {
    if (environment.TRUNKLINE_CREDENTIALS) return Credentials.load(environment.TRUNKLINE_CREDENTIALS);
    const { TRUNKLINE_HUB_URL: url, TRUNKLINE_AGENT_TOKEN: token } = environment;
    if (!url || !token) {
      throw new UsageError("set TRUNKLINE_CREDENTIALS, or TRUNKLINE_HUB_URL and TRUNKLINE_AGENT_TOKEN");
    }
    const hub = new HubAccess(url, token.trim());
    const name = environment.TRUNKLINE_AGENT_NAME || null;
    return new Credentials({ name, hub, caCerts: environment.TRUNKLINE_CA_CERTS || null });
  }

  /** Return the section of a door. Throws UsageError that names the section if the credentials lack it. */
  section(door) {
    if (this[door] === null) {
      throw new UsageError(`the credentials have no section '${door}'`, {
        advice: "write them anew: ./trunkline agents join NAME --credentials FILE",
      });
    }
    return this[door];
  }
}

/**
 * Return whether a file's secret is safe from other users, by the rule of PostgreSQL for key files.
 *
 * The group may read a file of root, because nobody but root can have given it to the group. Of any other file only
 * the owner may have rights, also if the user is root.
 *
 * @param {number} mode the mode of the file, such as 0o640
 * @param {number} owner the id of the user to whom it belongs
 * @param {number} user the id of the user who reads it
 */
export function isPrivate(mode, owner, user) {
  return (mode & (owner === ROOT && user !== ROOT ? 0o037 : 0o077)) === 0;
}

// The content of a file with a secret. UsageError if other users can use it, or this process may not read it.
function readPrivate(path) {
  let file;
  try {
    file = openSync(path, "r");
  } catch (error) {
    if (error.code !== "EACCES") throw error;
    throw new UsageError(`${path} cannot be read by this process (${shownOwner(path)}${MOUNTED})`, {
      advice: "run this program as the owner of the file, or give the file to this user: mode 0600",
    });
  }
  try {
    const found = fstatSync(file);
    if (process.platform !== "win32" && !isPrivate(found.mode & 0o777, found.uid, process.geteuid())) {
      throw new UsageError(`${path} is readable by others (${shown(found)}; ${MOUNTED})`, { advice: `run: chmod 600 ${path}` });
    }
    return readFileSync(file);
  } finally {
    closeSync(file);
  }
}

function shown({ mode, uid, gid }) {
  return `mode ${(mode & 0o777).toString(8).padStart(4, "0")}, owner ${uid}, group ${gid}`;
}

function shownOwner(path) {
  try {
    return `${shown(statSync(path))}; this process is user ${process.geteuid()}; `;
  } catch {
    return ""; // its folder cannot be entered
  }
}

function isHttpUrl(text) {
  try {
    const { protocol, hostname } = new URL(text);
    return (protocol === "http:" || protocol === "https:") && hostname !== "";
  } catch {
    return false;
  }
}
