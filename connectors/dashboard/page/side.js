// The three lists at the side: agents, mailboxes, rejections by reason.

import { age, button, count, make, moment, now, setState, setText, shown, spans } from "/page/text.js";

const ROWS = 60;
const ORDER = { blocked: 0, working: 1, initializing: 2, idle: 3, stopped: 9 };

// Each list: its panel's id and title, the text for no rows, and the part of the store that it shows. `items` returns
// the rows' data in order, each with a `key`. `cells` are the classes of a row's spans. `update` fills a row.
const LISTS = [
  {
    id: "agents",
    title: "Agents",
    nothing: "Nobody takes part yet. Agents appear here when they join, or when a task starts one.",
    part: "agents",
    cells: { name: "row-name said", state: "state", note: "row-note said" },
    items: (store) =>
      sorted(
        [...store.agents.values()],
        (agent) => ORDER[agent.status] ?? 5,
        (agent) => agent.agent,
      ),
    total: (agents) => agents.filter((agent) => agent.status !== "stopped").length,
    update(row, agent) {
      row.item.dataset.agent = shown(agent.agent);
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
  },
  {
    id: "mailboxes",
    title: "Mailboxes",
    nothing: "Nothing waits. All messages have been read.",
    part: "mailboxes",
    cells: { name: "row-name said", figure: "row-figure", meter: "meter", note: "row-note" },
    items(store) {
      const waiting = store.mailboxes.mailboxes.filter((box) => box.depth > 0);
      const boxes = sorted(waiting, (box) => -box.depth, (box) => box.recipient);
      return boxes.map((box) => ({ ...box, deepest: boxes[0].depth, key: `${box.realm}/${box.recipient}` }));
    },
    total: (boxes, store) => store.mailboxes.total,
    update(row, box) {
      row.item.dataset.mailbox = shown(box.key);
      setText(row.name, box.realm === "default" ? box.recipient : box.key);
      setText(row.figure, count(box.depth));
      setText(row.note, box.oldest_ms === null ? "" : `oldest for ${age(now() - box.oldest_ms)}`);
      row.meter.style.backgroundSize = `${Math.max(1, (100 * box.depth) / box.deepest)}% 100%`;
    },
  },
  {
    id: "rejections",
    title: "Rejections",
    nothing: "Nothing has been rejected.",
    part: "reasons",
    cells: { name: "row-name", figure: "row-figure", note: "row-note" },
    items: (store) =>
      sorted(store.reasons, (one) => -one.count, (one) => one.reason).map((one) => ({ ...one, key: one.reason })),
    total: (reasons) => reasons.reduce((sum, one) => sum + one.count, 0),
    update(row, one) {
      row.item.dataset.reason = shown(one.reason);
      setText(row.name, one.reason.replaceAll("_", " "));
      setText(row.figure, count(one.count));
      setText(row.note, one.last_ms === null ? "" : `last at ${moment(one.last_ms)}`);
    },
  },
];

// Sort by a number, and where that is the same by a text.
function sorted(items, number, text) {
  return items.toSorted(
    (one, other) => number(one) - number(other) || (text(one) < text(other) ? -1 : Number(text(one) > text(other))),
  );
}

// Add the three panels. Those of the rejections are buttons that call `openReason(reason)`.
export function addLists(store, openReason) {
  for (const list of LISTS) {
    const rows = new Rows(list, list.id === "rejections" ? openReason : null);
    store.on(list.part, () => rows.render(list.items(store), store));
  }
}

// A panel with a list. It keeps a row's element while the row changes, so that focus and selection are kept.
class Rows {
  constructor(list, open) {
    this.of = list;
    this.open = open;
    this.total = make("span", "count");
    this.list = make("ul", "rows");
    this.empty = make("p", "empty", list.nothing);
    this.more = make("li", "more");
    this.rows = new Map();
    const title = make("h2", "", [`${list.title} `, this.total]);
    const panel = make("section", "panel", [make("div", "panel-head", title), this.list, this.empty]);
    for (const [end, element] of Object.entries({ title, count: this.total, empty: this.empty })) {
      element.id = `${list.id}-${end}`;
    }
    panel.setAttribute("aria-labelledby", title.id);
    document.getElementById("side").append(panel);
  }

  render(items, store) {
    const total = this.of.total(items, store);
    setText(this.total, total ? count(total) : "");
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
      const row = this.rows.get(item.key) ?? this.newRow(item.key);
      const next = before ? before.nextSibling : this.list.firstChild;
      if (next !== row.item) this.list.insertBefore(row.item, next);
      before = row.item;
      this.of.update(row, item);
    }
    this.empty.hidden = items.length > 0;
    this.more.remove();
    if (items.length > ROWS) {
      setText(this.more, `and ${count(items.length - ROWS)} more`);
      this.list.append(this.more);
    }
  }

  newRow(key) {
    const cells = spans(this.of.cells);
    const parts = Object.values(cells);
    const body = this.open ? button("row", parts, () => this.open(key)) : make("div", "row", parts);
    const row = { item: make("li", "", body), body, ...cells };
    this.rows.set(key, row);
    return row;
  }
}
