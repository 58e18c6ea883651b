// Requests of the page to its server. Every address is a path of this origin.

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
    this.isRefusal = status === 401 || status === 403; // the user must log in
  }
}

async function ask(path, options) {
  const response = await fetch(path, options);
  if (response.ok) return response.json();
  // Where the body is no JSON, the status says enough.
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.message || `status ${response.status}`);
}

export function get(path, signal) {
  return ask(path, { cache: "no-store", signal });
}

export function post(path, body) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}
