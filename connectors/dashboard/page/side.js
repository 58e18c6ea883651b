// The three lists at the side: agents, mailboxes, rejections by reason.

import { age, count, make, moment, now, setState, setText, shown } from "/page/text.js";

const SVG = "http://www.w3.org/2000/svg";
const ROWS = 60;

// A list whose rows stay the same elements while they change, so that focus and selection stay, too.
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

const ORDER = { blocked: 0, working: 1, initializing: 2, idle: 3, stopped: 9 };

export function agentList(store) {
  const total = document.getElementById("agents-count");
  const rows = new Rows(
    "agents",
    (agent) => {
      const row = {
        item: make("li"),
        body: make("div", "row"),
        name: make("span", "row-name said"),
        state: make("span", "state"),
        note: make("span", "row-note said"),
      };
      row.body.append(row.name, row.state, row.note);
      row.item.append(row.body);
      row.item.dataset.agent = shown(agent.agent);
      return row;
    },
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
      const row = {
        item: make("li"),
        body: make("div", "row"),
        name: make("span", "row-name said"),
        figure: make("span", "row-figure"),
        note: make("span", "row-note"),
        bar: document.createElementNS(SVG, "rect"),
      };
      const svg = document.createElementNS(SVG, "svg");
      svg.setAttribute("viewBox", "0 0 100 3");
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("aria-hidden", "true");
      row.bar.setAttribute("height", "3");
      svg.append(row.bar);
      row.body.append(row.name, row.figure, make("span", "meter", svg), row.note);
      row.item.append(row.body);
      row.item.dataset.mailbox = shown(box.key);
      return row;
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
    (one) => {
      const row = {
        item: make("li"),
        body: make("button", "row"),
        name: make("span", "row-name"),
        figure: make("span", "row-figure"),
        note: make("span", "row-note"),
      };
      row.body.type = "button";
      row.body.append(row.name, row.figure, row.note);
      row.body.addEventListener("click", () => open(one.reason));
      row.item.append(row.body);
      row.item.dataset.reason = shown(one.reason);
      return row;
    },
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
