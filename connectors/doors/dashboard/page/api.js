// Requests of the page to its server. Every address is a path of this origin.

// The answer to a login contains this key, and changes need it beside the cookie. Only this origin's scripts in this
// tab can read it: no other site, and no program on another port of this host.
const CHANGE_KEY = "change-key";

class Refused extends Error {
  constructor(status, message, reason) {
    super(message);
    this.status = status;
    this.reason = reason;
    this.isRefusal = status === 401 || status === 403; // the user must log in
  }
}

async function ask(path, options) {
  const response = await fetch(path, options);
  if (response.ok) return response.json();
  // Where the body is no JSON, the status says enough.
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.message || `status ${response.status}`, body?.reason);
}

export function get(path, signal) {
  return ask(path, { cache: "no-store", signal });
}

function post(path, body) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

// A request that changes something.
export function change(path) {
  const headers = { "X-Trunkline-Change-Key": sessionStorage.getItem(CHANGE_KEY) ?? "" };
  return ask(path, { method: "POST", headers });
}

export async function logInWith(token) {
  const found = await post("/api/login", { token });
  sessionStorage.setItem(CHANGE_KEY, found.change_key);
}

export async function logOut() {
  sessionStorage.removeItem(CHANGE_KEY);
  await post("/api/logout", {});
}
