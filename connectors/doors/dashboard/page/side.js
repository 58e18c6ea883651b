// The lists at the side: agents, tasks, mailboxes, webhooks, rejections by reason.

import { KeyedList } from "/page/keyed_list.js";
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
    id: "tasks",
    title: "Tasks",
    nothing: "No tasks yet. They appear here when they are submitted.",
    part: "tasks",
    cells: { name: "row-name said", state: "state", note: "row-note said" },
    items: (store) =>
      sorted(
        [...store.tasks.values()],
        (task) => -task.submitted_ms,
        (task) => task.task_id,
      ).map((task) => ({ ...task, key: task.task_id })),
    total: (tasks) => tasks.filter((task) => task.ended_ms === null).length,
    update(row, task) {
      row.item.dataset.task = shown(task.task_id);
      setText(row.name, task.description || "(no description)");
      setState(row.state, task.status);
      row.body.classList.toggle("is-over", task.ended_ms !== null);
      const ended = task.ended_ms !== null;
      const time = ended ? `${age(now() - task.ended_ms)} ago` : `for ${age(now() - (task.started_ms ?? task.submitted_ms))}`;
      setText(row.note, [task.agent, task.error, time].filter(Boolean).join(" · "));
    },
  },
  {
    id: "mailboxes",
    title: "Mailboxes",
    nothing: "Nothing waits, and nothing is dead. All messages have been read.",
    part: "mailboxes",
    cells: { name: "row-name said", figure: "row-figure", meter: "meter", note: "row-note" },
    items(store) {
      const filled = store.mailboxes.mailboxes.filter((box) => box.depth > 0 || box.dead > 0);
      const boxes = sorted(filled, (box) => -box.depth, (box) => box.recipient);
      return boxes.map((box) => ({ ...box, deepest: boxes[0].depth, key: `${box.realm}/${box.recipient}` }));
    },
    total: (boxes, store) => store.mailboxes.total,
    update(row, box) {
      row.item.dataset.mailbox = shown(box.key);
      setText(row.name, box.realm === "default" ? box.recipient : box.key);
      setText(row.figure, count(box.depth));
      const oldest = box.depth && box.oldest_ms !== null ? `oldest for ${age(now() - box.oldest_ms)}` : null;
      setText(row.note, [oldest, box.dead && `${count(box.dead)} dead`].filter(Boolean).join(" · "));
      const part = box.depth ? Math.max(1, (100 * box.depth) / box.deepest) : 0;
      row.meter.style.backgroundSize = `${part}% 100%`;
    },
  },
  {
    id: "webhooks",
    title: "Webhooks",
    nothing: "No address is called. trunkline webhooks set makes a webhook.",
    part: "webhooks",
    cells: { name: "row-name said", state: "state", note: "row-note said" },
    items: (store) => store.webhooks.webhooks.map((hook) => ({ ...hook, key: hook.webhook })),
    total: (hooks, store) => store.webhooks.total,
    update(row, hook) {
      row.item.dataset.webhook = shown(hook.webhook);
      setText(row.name, hook.webhook);
      setState(row.state, hook.state);
      const parts = [hook.topic && `topic ${hook.topic}`, hook.host];
      if (hook.failures_in_a_row) parts.push(`${count(hook.failures_in_a_row)} failures in a row`);
      if (hook.state !== "active") parts.push(hook.why);
      if (hook.pending) parts.push(`${count(hook.pending)} pending`);
      if (hook.dead) parts.push(`${count(hook.dead)} dead`);
      if (hook.last_success_ms !== null) parts.push(`delivered ${age(now() - hook.last_success_ms)} ago`);
      setText(row.note, parts.filter(Boolean).join(" · "));
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

// Add the panels. `open` has for each list the function that a row calls with its data when it is pressed.
export function addLists(store, open) {
  for (const list of LISTS) {
    const panel = new Panel(list, open[list.id]);
    store.on(list.part, () => panel.render(list.items(store), store));
  }
}

// A panel with a list.
class Panel {
  constructor(list, open) {
    this.of = list;
    this.open = open;
    this.total = make("span", "count");
    this.list = make("ul", "rows");
    this.empty = make("p", "empty", list.nothing);
    this.more = make("li", "more");
    this.rows = new KeyedList(this.list, () => this.newRow(), (row, item) => list.update(row, item));
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
    this.more.remove();
    this.rows.render(items.slice(0, ROWS));
    this.empty.hidden = items.length > 0;
    if (items.length > ROWS) {
      setText(this.more, `and ${count(items.length - ROWS)} more`);
      this.list.append(this.more);
    }
  }

  newRow() {
    const cells = spans(this.of.cells);
    const row = { ...cells };
    row.body = button("row", Object.values(cells), () => this.open(row.data));
    row.item = make("li", "", row.body);
    return row;
  }
}
