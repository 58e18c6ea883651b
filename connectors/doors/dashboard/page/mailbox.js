// A mailbox in the drawer: its waiting, leased and dead messages. One message. The replay of a dead message.

import { openAgent } from "/page/agents.js";
import { change } from "/page/api.js";
import { KeyedList } from "/page/keyed_list.js";
import { age, block, button, count, countdown, facts, linkTo, make, moment, now, said, setText, shown, spans, state } from "/page/text.js";

const FIRST = 100;
// The server lists no more of a kind.
const MOST = 1000;

// The three lists of a mailbox, the longest last: which messages a cut list has, what is said of a message, and its
// figure, which changes with the time.
const KINDS = [
  {
    id: "leased",
    title: "Leased",
    nothing: "No message is leased.",
    order: "first to end",
    parts: (message) => [`held by ${message.handed_to}`, `attempt ${count(message.attempts)}`],
    figure: (message) => leaseLeft(message.lease_until_ms),
  },
  {
    id: "dead",
    title: "Dead",
    nothing: "No message is dead.",
    order: "newest",
    parts: (message) => [`${count(message.attempts)} ${message.attempts === 1 ? "attempt" : "attempts"}`, message.last_reason],
    figure: (message) => `died ${age(now() - message.ended_ms)} ago`,
  },
  {
    id: "waiting",
    title: "Waiting",
    nothing: "No message waits.",
    order: "next",
    parts: ({ attempts, last_reason }) =>
      attempts ? [`handed out ${attempts === 1 ? "once" : `${count(attempts)} times`}`, last_reason] : [],
    figure: (message) => old(message),
  },
];

export function openMailbox(drawer, realm, recipient, back = null) {
  const view = new MailboxView(drawer, realm, recipient, back);
  drawer.follow(`Mailbox ${nameOf(realm, recipient)}`, `#mailbox/${realm}/${recipient}`, back, view);
}

function nameOf(realm, recipient) {
  return realm === "default" ? recipient : `${realm}/${recipient}`;
}

function pathOf(realm, recipient, id) {
  const path = `/api/mailboxes/${encodeURIComponent(realm)}/${encodeURIComponent(recipient)}`;
  return id === undefined ? path : `${path}/messages/${encodeURIComponent(id)}`;
}

class MailboxView {
  constructor(drawer, realm, recipient, back) {
    this.drawer = drawer;
    this.realm = realm;
    this.recipient = recipient;
    this.limit = FIRST;
    this.mayReplay = false;
    this.open = () => openMailbox(drawer, realm, recipient, back);
    this.note = newNote();
    this.sections = KINDS.map((kind) => this.section(kind));
    this.owner = make("p", "links");
    this.root = make("div", "", [this.owner, this.note, ...this.sections.map((section) => section.element)]);
  }

  path() {
    return `${pathOf(this.realm, this.recipient)}?limit=${this.limit}`;
  }

  concerns(stream) {
    return stream === `mailbox/${this.realm}/${this.recipient}`;
  }

  section(kind) {
    const total = make("span", "count");
    const title = make("h3", "", [`${kind.title} `, total]);
    title.id = `messages-${kind.id}`;
    const list = make("ul", "rows");
    list.setAttribute("aria-labelledby", title.id);
    list.dataset.messages = kind.id;
    const empty = make("p", "step-note", kind.nothing);
    const cut = make("p", "step-note");
    const all = button("link", "", () => {
      this.limit = MOST;
      this.drawer.refresh();
      this.drawer.title.focus();
    });
    const rows = new KeyedList(list, () => this.newRow(kind), (row) => this.update(kind, row), () => this.drawer.title.focus());
    const element = make("section", "", [title, empty, list, cut, all]);
    element.setAttribute("aria-labelledby", title.id);
    return { kind, element, total, list, empty, cut, all, rows };
  }

  newRow(kind) {
    const cells = spans({ name: "row-name said", figure: "row-figure", note: "row-note said" });
    const row = { ...cells };
    row.body = button("row", Object.values(cells), () => openMessage(this.drawer, this.realm, this.recipient, row.data.message_id, this.open));
    row.item = make("li", "message", row.body);
    if (kind.id === "dead") {
      row.replay = replayButton(this, () => row.data);
      row.item.append(row.replay);
    }
    return row;
  }

  draw(found) {
    this.mayReplay = found.may_replay;
    for (const section of this.sections) {
      const { count: total, messages } = found[section.kind.id];
      setText(section.total, count(total));
      section.rows.render(messages.map((message) => ({ ...message, key: message.message_id })));
      section.empty.hidden = total > 0;
      section.list.hidden = total === 0;
      const hasMore = messages.length < total;
      section.cut.hidden = !hasMore;
      section.all.hidden = !hasMore || this.limit >= MOST;
      setText(section.cut, `The ${section.kind.order} ${count(messages.length)} of ${count(total)}.`);
      setText(section.all, `Show up to ${count(MOST)}`);
    }
    if (!this.root.isConnected) this.drawer.body.replaceChildren(this.root);
    const hasAgent = this.realm === "default" && [...this.drawer.store.agents.values()].some((agent) => agent.agent === this.recipient);
    if (hasAgent && !this.owner.firstChild) {
      this.owner.append(button("link", ["Agent ", said(this.recipient)], () => openAgent(this.drawer, this.recipient, this.open)));
    }
  }

  update(kind, row) {
    const message = row.data;
    row.item.dataset.message = shown(message.message_id);
    setText(row.name, `${message.kind} from ${message.sender}`);
    const parts = [...Object.values(message.described), message.priority === "normal" ? null : `${message.priority} priority`, ...kind.parts(message)];
    if (message.replay_of) parts.push(`repeats ${message.replay_of}`);
    if (message.replayed_as) parts.push("replayed");
    row.said = parts.filter(Boolean).join(" · ");
    row.body.title = shown(row.said);
    if (row.replay) {
      row.replay.hidden = !this.mayReplay || Boolean(message.replayed_as);
      row.replay.setAttribute("aria-label", `Replay ${shown(message.kind)} from ${shown(message.sender)}, ${shown(message.message_id)}`);
    }
    this.updateTimes(kind, row);
  }

  updateTimes(kind, row) {
    setText(row.figure, kind.figure(row.data));
    setText(row.note, [row.said, kind.id === "waiting" ? null : old(row.data)].filter(Boolean).join(" · "));
  }

  tick() {
    let hasEnded = false;
    for (const section of this.sections) {
      for (const row of section.rows.rows.values()) {
        this.updateTimes(section.kind, row);
        hasEnded ||= section.kind.id === "leased" && row.data.lease_until_ms <= now();
      }
    }
    // No record has to be settled for a lease to run out.
    if (hasEnded) this.drawer.refresh();
  }
}

function leaseLeft(until) {
  return until > now() ? `${countdown(until - now())} left` : "lease over";
}

function old(message) {
  return `${age(now() - message.posted_ms)} old`;
}

// One message

function openMessage(drawer, realm, recipient, id, back) {
  const note = newNote();
  const open = () => openMessage(drawer, realm, recipient, id, back);
  const lease = make("span");
  const view = {
    drawer,
    realm,
    recipient,
    note,
    open,
    path: () => pathOf(realm, recipient, id),
    concerns: (stream) => stream === `mailbox/${realm}/${recipient}`,
    draw(found) {
      view.found = found;
      view.tick();
      drawer.fill([note, ...messageParts(view, found, lease)]);
    },
    tick() {
      const { state: status, lease_until_ms: until } = view.found ?? {};
      setText(lease, status === "leased" ? `${moment(until)}, ${leaseLeft(until)}` : "");
      if (status === "leased" && until <= now()) drawer.refresh();
    },
  };
  drawer.follow("Message", null, back, view);
}

function messageParts(view, found, lease) {
  const { drawer, realm, recipient, open } = view;
  const link = (id) => id && linkTo(id, `message ${id}`, () => openMessage(drawer, realm, recipient, id, open));
  const isKnown = [...drawer.store.agents.values()].some((agent) => agent.agent === found.sender);
  const sender = isKnown
    ? linkTo("sender", found.sender, () => openAgent(drawer, found.sender, open))
    : said(found.sender);
  const parts = [
    facts([
      ["State", state(found.state)],
      ["From", [sender, found.sender_verified ? "" : " (not verified)"]],
      ["To", linkTo("mailbox", nameOf(realm, recipient), () => openMailbox(drawer, realm, recipient, open))],
      ["Kind", said(found.kind)],
      ...Object.entries(found.described).map(([name, value]) => [name, said(value)]),
      ["Priority", found.priority],
      ["Message", said(found.message_id, "mono")],
      ["Posted", `${moment(found.posted_ms)}, ${age(now() - found.posted_ms)} ago`],
      ["Expires", found.expires_at && said(found.expires_at)],
      ["Attempts", found.attempts ? count(found.attempts) : null],
      ["Handed to", found.handed_to && said(`${found.handed_to}, ${moment(found.handed_ms)}`)],
      ["Lease", found.state === "leased" ? lease : null],
      ["Ended", found.ended_ms && moment(found.ended_ms)],
      ["Last reason", found.last_reason && said(found.last_reason)],
      ["Reply to", found.in_reply_to && said(found.in_reply_to, "mono")],
      ["Thread", found.thread && said(found.thread, "mono")],
      ["Repeats", link(found.replay_of)],
      ["Replayed as", link(found.replayed_as)],
    ]),
  ];
  if (found.state === "dead" && found.may_replay && !found.replayed_as) {
    const again = replayButton(view, () => found);
    again.dataset.key = "replay";
    parts.push(again);
  }
  parts.push(make("h3", "", "Body"), block(found.body, "body"));
  if (found.body_cut) parts.push(make("p", "step-note", "The rest is left out."));
  return parts;
}

// The replay of a dead message

// What became of a replay. A screen reader reads it when it changes.
function newNote() {
  const note = make("p", "note");
  note.setAttribute("role", "status");
  note.tabIndex = -1;
  note.dataset.key = "note";
  return note;
}

// `view` has the mailbox, the note to fill, and the function `open` that shows it again.
function replayButton(view, message) {
  const pressed = async () => {
    if (element.ariaDisabled === "true") return; // pressed twice
    // Not `disabled`: the focus must stay until the note has it.
    element.ariaDisabled = "true";
    const { drawer, realm, recipient, note } = view;
    try {
      const found = await change(`${pathOf(realm, recipient, message().message_id)}/replay`);
      const link = button("link", said(`message ${found.message_id}`), () =>
        openMessage(drawer, realm, recipient, found.message_id, view.open),
      );
      note.classList.remove("fault");
      note.replaceChildren("Replayed as ", link, ".");
    } catch (error) {
      note.classList.add("fault");
      note.replaceChildren(`Not replayed: ${shown(error.message)}. `);
      if (error.reason === "login_needed") {
        note.append(button("link", "Log in again", () => drawer.logInAgain("Log in to make changes in this tab.")));
      }
    }
    element.ariaDisabled = null;
    note.focus();
    drawer.refresh();
  };
  const element = button("replay", "Replay", pressed);
  return element;
}
