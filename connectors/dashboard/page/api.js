// What the page asks its server for. Every address is a path of this origin.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function answered(response) {
  if (response.ok) return response.json();
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).message || message;
  } catch {
    // No JSON: the status says enough.
  }
  throw new Refused(response.status, message);
}

export async function get(path, signal) {
  return answered(await fetch(path, { credentials: "same-origin", cache: "no-store", signal }));
}

export async function post(path, body) {
  return answered(
    await fetch(path, {
      method: "POST",
      credentials: "same-origin",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    }),
  );
}
