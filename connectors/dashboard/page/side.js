// The three lists at the side: agents, mailboxes, rejections by reason.

import { age, button, count, make, moment, now, setState, setText, shown, svg } from "/page/text.js";

const ROWS = 60;

// A list that keeps a row's element while the row changes, so that focus and selection are kept.
class Rows {
  constructor(id, newRow, update) {
    this.list = document.getElementById(id);
    this.empty = document.getElementById(`${id === "reasons" ? "rejections" : id}-empty`);
    this.newRow = newRow;
    this.update = update;
    this.rows = new Map();
    this.more = make("li", "more");
  }

  render(items) {
    const shownItems = items.slice(0, ROWS);
    const wanted = new Set(shownItems.map((item) => item.key));
    for (const [key, row] of this.rows) {
      if (!wanted.has(key)) {
        row.item.remove();
        this.rows.delete(key);
      }
    }
    let before = null;
    for (const item of shownItems) {
      let row = this.rows.get(item.key);
      if (!row) {
        row = this.newRow(item);
        this.rows.set(item.key, row);
      }
      const next = before ? before.nextSibling : this.list.firstChild;
      if (next !== row.item) this.list.insertBefore(row.item, next);
      before = row.item;
      this.update(row, item);
    }
    this.empty.hidden = items.length > 0;
    this.more.remove();
    if (items.length > ROWS) {
      setText(this.more, `and ${count(items.length - ROWS)} more`);
      this.list.append(this.more);
    }
  }
}

// A row of a list: `body` with its parts, and the key in the data attribute `kind`.
function newRow(kind, key, body, parts) {
  const row = { item: make("li"), body, ...parts };
  body.append(...Object.values(parts));
  row.item.append(body);
  row.item.dataset[kind] = shown(key);
  return row;
}

const ORDER = { blocked: 0, working: 1, initializing: 2, idle: 3, stopped: 9 };

export function agentList(store) {
  const total = document.getElementById("agents-count");
  const rows = new Rows(
    "agents",
    (agent) =>
      newRow("agent", agent.agent, make("div", "row"), {
        name: make("span", "row-name said"),
        state: make("span", "state"),
        note: make("span", "row-note said"),
      }),
    (row, agent) => {
      setText(row.name, agent.agent);
      setState(row.state, agent.status);
      const over = agent.status === "stopped";
      row.body.classList.toggle("is-over", over);
      const since = over ? agent.stopped_ms : agent.started_ms;
      const parts = [over ? agent.stopped_why : agent.task];
      if (agent.capabilities.length) parts.push(agent.capabilities.join(", "));
      if (agent.waiting) parts.push(`${count(agent.waiting)} waiting`);
      parts.push(over ? `${age(now() - since)} ago` : `for ${age(now() - since)}`);
      setText(row.note, parts.filter(Boolean).join(" · "));
      row.body.title = shown([agent.task, agent.task_id && `task ${agent.task_id}`].filter(Boolean).join("\n"));
    },
  );
  store.on("agents", () => {
    const agents = [...store.agents.values()];
    agents.sort(
      (one, other) =>
        (ORDER[one.status] ?? 5) - (ORDER[other.status] ?? 5) || (one.agent < other.agent ? -1 : one.agent > other.agent ? 1 : 0),
    );
    const present = agents.filter((agent) => agent.status !== "stopped").length;
    setText(total, present ? count(present) : "");
    rows.render(agents);
  });
}

export function mailboxList(store) {
  const total = document.getElementById("mailboxes-count");
  const rows = new Rows(
    "mailboxes",
    (box) => {
      const bar = svg("rect", { height: 3 });
      const frame = { viewBox: "0 0 100 3", preserveAspectRatio: "none", "aria-hidden": "true" };
      const parts = {
        name: make("span", "row-name said"),
        figure: make("span", "row-figure"),
        meter: make("span", "meter", svg("svg", frame, bar)),
        note: make("span", "row-note"),
      };
      return { ...newRow("mailbox", box.key, make("div", "row"), parts), bar };
    },
    (row, box) => {
      setText(row.name, box.realm === "default" ? box.recipient : box.key);
      setText(row.figure, count(box.depth));
      setText(row.note, box.oldest_ms === null ? "" : `oldest for ${age(now() - box.oldest_ms)}`);
      row.bar.setAttribute("width", String(Math.max(1, (100 * box.depth) / box.deepest)));
    },
  );
  store.on("mailboxes", () => {
    const boxes = store.mailboxes.mailboxes.filter((box) => box.depth > 0);
    boxes.sort((one, other) => other.depth - one.depth || (one.recipient < other.recipient ? -1 : 1));
    const deepest = boxes.length ? boxes[0].depth : 1;
    setText(total, store.mailboxes.total ? count(store.mailboxes.total) : "");
    rows.render(boxes.map((box) => ({ ...box, deepest, key: `${box.realm}/${box.recipient}` })));
  });
}

export function reasonList(store, open) {
  const total = document.getElementById("rejections-count");
  const rows = new Rows(
    "reasons",
    (one) =>
      newRow("reason", one.reason, button("row", null, () => open(one.reason)), {
        name: make("span", "row-name"),
        figure: make("span", "row-figure"),
        note: make("span", "row-note"),
      }),
    (row, one) => {
      setText(row.name, one.reason.replaceAll("_", " "));
      setText(row.figure, count(one.count));
      setText(row.note, one.last_ms === null ? "" : `last at ${moment(one.last_ms)}`);
    },
  );
  store.on("reasons", () => {
    const reasons = [...store.reasons].sort((one, other) => other.count - one.count || (one.reason < other.reason ? -1 : 1));
    setText(total, count(reasons.reduce((sum, one) => sum + one.count, 0)));
    if (!reasons.length) setText(total, "");
    rows.render(reasons.map((one) => ({ ...one, key: one.reason })));
  });
}
