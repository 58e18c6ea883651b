// The live events: one connection that comes back by itself, with the place in the log that it had.

const AGENTS = ["agent:created", "agent:updated", "agent:removed"];
const NAMES = ["hello", "reset", ...AGENTS, "job", "task", "message", "verdict", "pulse"];
// The server says something each second.
const SILENCE_MS = 5000;
// One page asks one gateway, mostly on its own machine: a person should not wait longer than this once it is back.
const WAITS_MS = [300, 1000, 2000];
// A gateway that takes the connection and says nothing must not hold the page for ever.
const ANSWER_MS = 5000;

export class Events {
  // `take(name, data)` for each event; `tell(state)`: live, reconnecting or stale; `refused()`: log in again.
  constructor(take, tell, refused) {
    this.take = take;
    this.tell = tell;
    this.refused = refused;
    this.lastId = "";
    this.failures = 0;
    this.source = null;
    this.timer = 0;
    this.watch = 0;
  }

  open() {
    this.close();
    const after = this.lastId ? `?after=${encodeURIComponent(this.lastId)}` : "";
    const source = new EventSource(`/api/events${after}`);
    this.source = source;
    this.heardAt = performance.now();
    for (const name of NAMES) {
      source.addEventListener(name, (event) => {
        this.heardAt = performance.now();
        this.failures = 0;
        if (event.lastEventId) this.lastId = event.lastEventId;
        this.tell("live");
        this.take(name, JSON.parse(event.data));
      });
    }
    source.addEventListener("error", () => this.failed(source));
    this.watch = setInterval(() => this.look(), 1000);
  }

  close() {
    clearTimeout(this.timer);
    clearInterval(this.watch);
    if (this.source) this.source.close();
    this.source = null;
  }

  look() {
    const silence = performance.now() - this.heardAt;
    if (silence > SILENCE_MS && document.visibilityState === "visible") {
      this.tell("stale");
      if (silence > 2 * SILENCE_MS) this.again();
    }
  }

  failed(source) {
    if (source !== this.source) return;
    this.tell("reconnecting");
    this.again();
  }

  // Not the browser's own way: it gives up at an answer that is an error, and waits longer than need be.
  again() {
    this.close();
    const wait = WAITS_MS[Math.min(this.failures, WAITS_MS.length - 1)];
    this.failures += 1;
    this.timer = setTimeout(async () => {
      try {
        const found = await fetch("/api/mailboxes", {
          credentials: "same-origin",
          cache: "no-store",
          signal: AbortSignal.timeout(ANSWER_MS),
        });
        if (found.status === 401 || found.status === 403) {
          this.refused();
          return;
        }
        if (found.ok) {
          this.open();
          return;
        }
      } catch {
        // Nobody is there yet, or nobody answers.
      }
      this.again();
    }, wait);
  }
}
