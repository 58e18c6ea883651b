// Requests of the page to its server. Every address is a path of this origin.

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
    this.isRefusal = status === 401 || status === 403; // the user must log in
  }
}

async function answered(response) {
  if (response.ok) return response.json();
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).message || message;
  } catch {
    // The body is no JSON, and the status says enough.
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
