// The drawer: one job's timeline, the events behind one reason, or one event. Other modules open mailboxes, agents
// and tasks in it.

import { get } from "/page/api.js";
import { block, button, count, duration, facts, make, moment, now, row, said, setText, shown, state } from "/page/text.js";

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
    this.view = null;
    this.hash = "";
    this.asked = null;
    document.getElementById("drawer-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.closed());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside it
    });
    setInterval(() => this.view?.tick?.(), 1000);
  }

  closed() {
    if (this.dialog.open) return; // opened again since
    this.asked?.abort();
    this.view = null;
    // The user may have changed the address meanwhile.
    if (location.hash === this.hash) history.replaceState(null, "", location.pathname);
  }

  // Show a view that follows its subject: its title, its address, if it has one, and what the button Back does, if there
  // is one. `source` has `path()`, the address of its data; `draw(data)`; and may have `concerns(stream)`, for records
  // after which the data are asked for again; `tick()`, called each second; and `missing`, the data instead of a 404.
  follow(title, hash, back, source) {
    this.asked?.abort();
    this.asked = new AbortController();
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
    this.view = Object.assign(source, { signal: this.asked.signal, isAsking: false, isOld: false, isDrawn: false });
    this.refresh();
  }

  // Ask again if records of these streams concern the view.
  verdicts(found) {
    if (found.some(({ stream }) => this.view?.concerns?.(stream))) this.refresh();
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
      if (view.missing && error.status === 404) {
        view.draw(view.missing);
        return;
      }
      view.hasFailed = true;
      // Without an answer, or with 503, the gateway is away for a while: what is drawn stays.
      view.isOld = !error.status || error.status === 503;
      if (!view.isDrawn || !view.isOld) this.body.replaceChildren(make("p", "fault", error.message));
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

  openJob(id) {
    const records = [];
    let isCut = false;
    const last = () => records.at(-1)?.position[1] ?? -1;
    this.follow(`Job ${id}`, `#job/${id}`, null, {
      path: () => `/api/jobs/${id}${records.length ? `?after=${last()}` : ""}`,
      concerns: (stream) => stream === `job/${id}`,
      draw: (found) => {
        isCut ||= found.older_left_out;
        for (const record of found.records) if (record.position[1] > last()) records.push(record);
        this.fill(this.jobParts(found, records, isCut));
      },
    });
  }

  jobParts(found, records, isCut) {
    const parts = [make("p", "lead said", found.description || "(no description)"), jobFacts(found.job, records)];
    if (found.why) parts.push(make("p", "fault", found.why));
    if (isCut) parts.push(make("p", "step-note", "Older events are in the ledger: trunkline jobs export."));
    const steps = stepsOf(records).map((step) => this.step(step));
    return [...parts, make("h3", "", "Timeline"), make("ol", "timeline", steps)];
  }

  step({ record, again }) {
    const [kind, name, note] = meaning(record);
    const head = [make("span", "step-name", name)];
    if (record.verdict === "rejected") {
      const back = () => this.openJob(this.jobOf(record));
      const tag = button("tag", record.reason, () => this.openRecord(record, back));
      Object.assign(tag.dataset, { tone: "bad", key: record.position.join() });
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

  openReason(reason) {
    this.follow(`Rejected: ${reason.replaceAll("_", " ")}`, `#rejected/${reason}`, null, {
      path: () => `/api/rejections?reason=${encodeURIComponent(reason)}`,
      draw: ({ events, reasons }) => {
        const total = reasons.find((one) => one.reason === reason)?.count ?? events.length;
        const note = events.length < total ? `The newest ${count(events.length)} of ${count(total)}.` : `${count(total)} in all.`;
        const rows = events.map((event) => make("li", "", this.rejected(event, reason)));
        this.fill([make("p", "step-note", note), make("ul", "rows", rows)]);
      },
    });
  }

  rejected(event, reason) {
    const time = make("span", "row-figure step-time", moment(event.logged_ms));
    return row(event.stream, time, event.why ?? event.type ?? "", () => this.openRecord(event, () => this.openReason(reason)));
  }

  // One event. It may be too new for the ledger and too old for memory. Then show what the list has.

  openRecord(known, back) {
    this.follow("Event", null, back, {
      path: () => `/api/records/${known.position.join("/")}`,
      draw: (record) => this.fill(this.recordParts(record)),
      missing: known,
    });
  }

  recordParts(record) {
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
    const text = record.body === null ? record.raw || null : JSON.stringify(record.body, null, 2);
    return [...parts, make("h3", "", "What was sent, masked as in the ledger"), block(text, "body")];
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
