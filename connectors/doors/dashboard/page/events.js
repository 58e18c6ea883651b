// The live events: one connection that is reopened by itself, from the log position of the last event.

import { get } from "/page/api.js";

const AGENTS = ["agent:created", "agent:updated", "agent:removed"];
const NAMES = ["hello", "reset", ...AGENTS, "job", "task", "message", "verdict", "pulse"];
// The server sends an event each second.
const SILENCE_MS = 5000;
// A page asks one gateway, usually on its own machine. Once that is back, a person waits no longer than this.
// A wait is between half of it and all of it, at random: not all pages come back in the same moment.
const WAITS_MS = [600, 1000, 2000];
// The longest wait for a gateway that accepts the connection and sends nothing.
const ANSWER_MS = 5000;

export class Events {
  // Calls `take(name, data)` for each event, `tell(state)` with live, reconnecting or stale, and `refused()` when
  // the user must log in again.
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

  // Reconnect. The browser's own reconnection gives up after an error status, and waits longer than necessary.
  again() {
    this.close();
    const wait = WAITS_MS[Math.min(this.failures, WAITS_MS.length - 1)] * (0.5 + Math.random() / 2);
    this.failures += 1;
    this.timer = setTimeout(async () => {
      try {
        await get("/api/mailboxes", AbortSignal.timeout(ANSWER_MS));
        this.open();
      } catch (error) {
        if (error.isRefusal) this.refused();
        else this.again(); // no gateway answers yet
      }
    }, wait);
  }
}
