// The drawer: one job's timeline, the events behind one reason, or one event. Other modules open mailboxes, agents
// and tasks in it.

import { get } from "/page/api.js";
import { button, count, duration, facts, make, moment, now, said, setText, shown, shownLines, state } from "/page/text.js";

const AGAIN_MS = 150;
// A followed view asks for its data again after this time at the earliest.
const FOLLOW_MS = 300;
const FAILED_MS = 2000;

export class Drawer {
  constructor(store) {
    this.store = store;
    this.dialog = document.getElementById("drawer");
    this.title = document.getElementById("drawer-title");
    this.body = document.getElementById("drawer-body");
    this.back = document.getElementById("drawer-back");
    this.job = null;
    this.view = null;
    this.hash = "";
    this.asked = null;
    this.timer = 0;
    document.getElementById("drawer-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.closed());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside it
    });
    store.on("drawer", () => this.jobChanged());
    setInterval(() => this.view?.tick?.(), 1000);
  }

  // Show an empty view: its address, if it has one, and what the button Back does, if there is one.
  show(title, hash = null, back = null) {
    this.asked?.abort();
    this.asked = new AbortController();
    this.job = null;
    this.view = null;
    setText(this.title, title);
    this.body.replaceChildren(make("p", "step-note", "…"));
    this.body.scrollTop = 0;
    this.back.hidden = back === null;
    this.back.onclick = back;
    if (hash) {
      this.hash = hash;
      history.replaceState(null, "", hash);
    }
    if (!this.dialog.open) this.dialog.showModal();
    this.title.focus();
    return this.asked.signal;
  }

  closed() {
    if (this.dialog.open) return; // opened again since
    this.asked?.abort();
    this.job = null;
    this.view = null;
    // The user may have changed the address meanwhile.
    if (location.hash === this.hash) history.replaceState(null, "", location.pathname);
  }

  failed(error) {
    if (error.name !== "AbortError") this.body.replaceChildren(make("p", "fault", error.message));
  }

  // Show a view that follows its subject. `source` has `path()`, the address of its data; `draw(data)`; and
  // `concerns(stream)`, for records after which the data are asked for again. `tick()` is called each second.
  follow(title, hash, back, source) {
    const signal = this.show(title, hash, back);
    this.view = Object.assign(source, { signal, isAsking: false, isOld: false, isDrawn: false });
    this.refresh();
  }

  async refresh() {
    const view = this.view;
    if (!view) return;
    view.isOld = true;
    if (view.isAsking) return;
    view.isAsking = true;
    while (view.isOld && this.view === view) {
      view.isOld = false;
      await this.draw(view);
      await new Promise((done) => setTimeout(done, view.isOld && view.hasFailed ? FAILED_MS : FOLLOW_MS));
    }
    view.isAsking = false;
  }

  async draw(view) {
    view.hasFailed = false;
    try {
      const found = await get(view.path(), view.signal);
      if (this.view !== view) return;
      view.draw(found);
      view.isDrawn = true;
    } catch (error) {
      if (this.view !== view) return;
      view.hasFailed = true;
      // Without an answer, or with 503, the gateway is away for a while: what is drawn stays.
      view.isOld = !error.status || error.status === 503;
      if (!view.isDrawn || !view.isOld) this.failed(error);
    }
  }

  // Fill the drawer anew. The place and the focus stay: an element is the same if it has the same `data-key`.
  fill(parts) {
    const at = this.body.scrollTop;
    const key = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.body.replaceChildren(...parts);
    this.body.scrollTop = at;
    if (key) ([...this.body.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key) ?? this.title).focus();
  }

  // One job

  async openJob(id) {
    const signal = this.show(`Job ${id}`, `#job/${id}`);
    this.job = { id, records: [], last: -1, found: null };
    await this.ask(`/api/jobs/${id}`, signal);
  }

  jobChanged() {
    const found = this.job?.found;
    const row = found && this.store.jobs.get(this.job.id);
    if (row && row.offset > (found.offset ?? -1)) this.more();
  }

  // Also reload for records that change no row: events that were sent again, or rejected.
  verdicts(found) {
    if (this.view && found.some((verdict) => this.view.concerns(verdict.stream))) this.refresh();
    if (this.job && found.some((verdict) => verdict.stream === `job/${this.job.id}`)) this.more();
  }

  more() {
    if (this.timer || !this.job) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      if (this.job) this.ask(`/api/jobs/${this.job.id}?after=${this.job.last}`, this.asked.signal);
    }, AGAIN_MS);
  }

  async ask(path, signal) {
    const job = this.job;
    try {
      const found = await get(path, signal);
      if (this.job !== job) return;
      job.found = { ...found, older_left_out: found.older_left_out || Boolean(job.found?.older_left_out) };
      for (const record of found.records) {
        if (record.position[1] > job.last) {
          job.records.push(record);
          job.last = record.position[1];
        }
      }
      this.drawJob();
    } catch (error) {
      if (this.job === job) this.failed(error);
    }
  }

  drawJob() {
    const { found, records } = this.job;
    const row = found.job;
    const parts = [make("p", "lead said", found.description || "(no description)"), jobFacts(row, records)];
    if (found.why) parts.push(make("p", "fault", found.why));
    if (found.older_left_out) parts.push(make("p", "step-note", "Older events are in the ledger: trunkline jobs export."));
    const steps = stepsOf(records).map((step) => this.step(step));
    parts.push(make("h3", "", "Timeline"), make("ol", "timeline", steps));
    const at = this.body.scrollTop;
    this.body.replaceChildren(...parts);
    this.body.scrollTop = at;
  }

  step({ record, again }) {
    const [kind, name, note] = meaning(record);
    const head = [make("span", "step-name", name)];
    if (record.verdict === "rejected") {
      const back = () => this.openJob(this.jobOf(record));
      const tag = button("tag", record.reason, () => this.openRecord(record, back));
      tag.dataset.tone = "bad";
      head.push(tag);
    } else if (record.verdict === "duplicate") head.push(make("span", "tag", "sent again"));
    if (again) head.push(make("span", "tag", `sent again ${again === 1 ? "once" : `${again} times`}`));
    if (record.late) head.push(make("span", "tag", "late"));
    head.push(make("span", "step-time", moment(record.logged_ms)));
    const item = make("li", "", make("div", "step-head", head));
    if (note) item.append(make("p", "step-note said", note));
    Object.assign(item.dataset, { kind, verdict: record.verdict });
    return item;
  }

  jobOf(record) {
    return record.stream.slice("job/".length);
  }

  // The records that were rejected for one reason

  async openReason(reason) {
    const signal = this.show(`Rejected: ${reason.replaceAll("_", " ")}`, `#rejected/${reason}`);
    try {
      const { events, reasons } = await get(`/api/rejections?reason=${encodeURIComponent(reason)}`, signal);
      const total = reasons.find((one) => one.reason === reason)?.count ?? events.length;
      const note = events.length < total ? `The newest ${count(events.length)} of ${count(total)}.` : `${count(total)} in all.`;
      const rows = events.map((event) => make("li", "", this.rejected(event, reason)));
      this.body.replaceChildren(make("p", "step-note", note), make("ul", "rows", rows));
    } catch (error) {
      this.failed(error);
    }
  }

  rejected(event, reason) {
    const parts = [
      make("span", "row-name said", event.stream),
      make("span", "row-figure step-time", moment(event.logged_ms)),
      make("span", "row-note said", event.why ?? event.type ?? ""),
    ];
    return button("row", parts, () => this.openRecord(event, () => this.openReason(reason)));
  }

  // One event

  async openRecord(known, back) {
    const [partition, offset] = known.position;
    const signal = this.show("Event", null, back);
    try {
      this.drawRecord(await get(`/api/records/${partition}/${offset}`, signal));
    } catch (error) {
      // The record may be too new for the ledger and too old for memory. Then show what the list has.
      if (error.status === 404) this.drawRecord(known);
      else this.failed(error);
    }
  }

  drawRecord(record) {
    const parts = [
      facts([
        ["Verdict", state(record.verdict)],
        ["Reason", record.reason],
        ["Why", record.why && said(record.why)],
        ["Stream", said(record.stream, "mono")],
        ["Type", record.type && said(record.type)],
        ["Sent by", record.principal && said(record.principal)],
        ["Event id", record.ce_id && said(record.ce_id, "mono")],
        ["Logged", moment(record.logged_ms)],
        ["Position", `partition ${record.position[0]}, offset ${record.position[1]}`],
      ]),
    ];
    if (/^job\/[0-9a-f]{8}$/.test(record.stream) && this.store.jobs.has(this.jobOf(record))) {
      parts.push(button("link", "Show this job's timeline", () => this.openJob(this.jobOf(record))));
    }
    parts.push(make("h3", "", "What was sent, masked as in the ledger"));
    const text = record.body === null ? record.raw : JSON.stringify(record.body, null, 2);
    if (text) {
      const block = make("pre", "block mono said");
      block.textContent = shownLines(text);
      block.tabIndex = 0;
      parts.push(block);
    } else parts.push(make("p", "step-note", "Nothing that may be shown to you."));
    this.body.replaceChildren(...parts);
  }
}

function jobFacts(row, records) {
  const again = records.filter((record) => record.verdict === "duplicate").length;
  const rejected = records.filter((record) => record.verdict === "rejected").length;
  const ran = row.started_ms ? duration((row.ended_ms ?? now()) - row.started_ms) : null;
  return facts([
    ["State", state(row.status)],
    ["Outcome", row.ended_ms ? said(row.last_detail ?? row.last_event ?? row.status) : null],
    ["Session", row.session && said(row.session)],
    ["Registered", row.registered_ms && said(`${moment(row.registered_ms)} by ${row.registered_by}`)],
    ["Ran", ran && (row.ended_ms ? ran : `${ran} so far`)],
    ["Events", `${count(row.events)} accepted`],
    ["Retries", again ? `${count(again)} sent again` : null],
    ["Rejected", rejected ? count(rejected) : null],
  ]);
}

// The steps of a timeline. An event that was sent again is shown with the event that it repeats.
function stepsOf(records) {
  const steps = [];
  const known = new Map();
  for (const record of records) {
    const step = known.get(record.ce_id);
    if (record.verdict === "duplicate" && step) {
      step.again += 1;
      continue;
    }
    const fresh = { record, again: 0 };
    if (record.verdict === "accepted" && record.ce_id) known.set(record.ce_id, fresh);
    steps.push(fresh);
  }
  return steps;
}

const KINDS = {
  started: "begin",
  progress: "progress",
  permission_required: "asks",
  completed: "good",
  error: "bad",
};

function meaning(record) {
  const body = record.body ?? {};
  if (record.type === "job.event") {
    const kind = KINDS[body.event] ?? "progress";
    const name = String(body.event ?? "event").replaceAll("_", " ");
    if (record.verdict === "rejected") return ["bad", name, record.why ?? body.detail];
    return [record.verdict === "duplicate" ? "again" : kind, name, body.detail];
  }
  const by = record.principal ? `by ${record.principal}` : "";
  const name = shown((record.type ?? "record").replace(/^job\./, ""));
  if (record.type === "job.picked") return ["begin", name, `${body.session ? `session ${body.session}, ` : ""}${by}`];
  const note = record.verdict === "rejected" ? record.why : [by, body.reason].filter(Boolean).join(": ");
  return [record.verdict === "rejected" ? "bad" : "plain", name, note];
}
