// The page: logs in, follows the live events, and passes them to the lists.

import { openAgent, openTask } from "/page/agents.js";
import { get, logInWith, logOut } from "/page/api.js";
import { Drawer } from "/page/drawer.js";
import { Events } from "/page/events.js";
import { Figures } from "/page/figures.js";
import { JobList } from "/page/jobs.js";
import { openMailbox } from "/page/mailbox.js";
import { addLists } from "/page/side.js";
import { Store } from "/page/store.js";
import { setClock, setText } from "/page/text.js";

const byId = (id) => document.getElementById(id);
const STATES = {
  connecting: "connecting",
  live: "live",
  reconnecting: "reconnecting, what you see may be old",
  stale: "silent, what you see may be old",
  out: "not logged in",
};

let returnTo = ""; // the address to open again after a login
const store = new Store();
const drawer = new Drawer(store);
const jobs = new JobList(store, (id) => drawer.openJob(id));
new Figures(store);
addLists(store, {
  agents: (agent) => openAgent(drawer, agent.agent),
  tasks: (task) => openTask(drawer, task.task_id),
  mailboxes: (box) => openMailbox(drawer, box.realm, box.recipient),
  webhooks: (hook) => openMailbox(drawer, "default", hook.webhook),
  rejections: (one) => drawer.openReason(one.reason),
});
drawer.logInAgain = (why) => {
  returnTo = location.hash;
  showLogin(why);
};

// The methods of the store for the events, by name without what is behind a colon.
const TAKES = {
  job: "takeJobs",
  agent: "takeAgents",
  task: "takeTasks",
  message: "takeMessages",
  verdict: "takeVerdicts",
  pulse: "takePulse",
};
let waiting = null; // events that came before the snapshot they follow
let loading = 0;
const events = new Events(take, tell, () => showLogin("Log in again."));

function tell(state) {
  const shownState = byId("connection");
  if (shownState.dataset.state === state) return;
  shownState.dataset.state = state;
  setText(byId("connection-text"), STATES[state]);
}

function take(name, data) {
  if (name === "hello" || name === "reset") {
    waiting = [];
    loadSnapshot();
  } else if (waiting) waiting.push([name, data]);
  else apply(name, data);
}

function apply(name, data) {
  if (name === "pulse") setClock(data.at_ms);
  store[TAKES[name.split(":")[0]]](data);
  if (name === "verdict") drawer.verdicts(data);
}

async function loadSnapshot() {
  loading += 1;
  const mine = loading;
  try {
    const found = await get("/api/snapshot");
    if (mine !== loading) return;
    setText(byId("who"), `${found.principal === found.role ? "" : `${found.principal}, `}${found.role}`);
    store.jobCounts = found.jobs;
    store.clearJobs();
    store.takeJobs(found.first_jobs.jobs);
    store.takeAgents(found.agents, true);
    store.takeTasks(found.tasks.tasks, true);
    store.takeMailboxes(found.mailboxes);
    store.takeWebhooks(found.webhooks);
    store.reasons = found.rejections.reasons;
    if (found.history.length > store.pulses.length) {
      store.pulses = found.history;
      store.pulse ??= found.history.at(-1);
    }
    for (const [name, data] of waiting ?? []) apply(name, data);
    waiting = null;
    showBoard();
    drawer.refresh();
    await loadJobs(found.first_jobs.next, mine);
  } catch (error) {
    if (mine !== loading) return;
    if (error.isRefusal) showLogin(error.message);
    else events.again();
  }
}

// Load the older jobs after the first screen, a thousand at a time.
async function loadJobs(next, mine) {
  while (next && mine === loading && store.order.length < 20000) {
    const page = await get(`/api/jobs?after=${next}`);
    if (mine !== loading) return;
    store.takeJobs(page.jobs);
    next = page.next;
  }
}

function show(isIn) {
  byId("login").hidden = isIn;
  byId("board").hidden = !isIn;
  byId("logout").hidden = !isIn;
}

function showBoard() {
  show(true);
  store.changed("jobs", "agents", "tasks", "mailboxes", "webhooks", "reasons", "figures");
  if (returnTo) history.replaceState(null, "", returnTo);
  returnTo = "";
  if (!drawer.dialog.open) openAddressed();
}

// The addresses of what the drawer shows. Names are by rule CM-01, which needs no escapes.
const ADDRESSES = [
  [/^#job\/([0-9a-f]{8})$/, (id) => drawer.openJob(id)],
  [/^#rejected\/([a-z_]+)$/, (reason) => drawer.openReason(reason)],
  [/^#agent\/([\w.-]+)$/, (name) => openAgent(drawer, name)],
  [/^#task\/([\w.-]+)$/, (id) => openTask(drawer, id)],
  [/^#mailbox\/([\w.-]+)\/([\w.-]+)$/, (realm, recipient) => openMailbox(drawer, realm, recipient)],
];

function openAddressed() {
  for (const [form, open] of ADDRESSES) {
    const found = form.exec(location.hash);
    if (found) open(...found.slice(1));
  }
}

function showLogin(why) {
  events.close();
  loading += 1;
  drawer.dialog.close();
  show(false);
  setText(byId("who"), "");
  tell("out");
  setText(byId("login-error"), why);
  byId("token").focus();
}

async function logIn(token) {
  await logInWith(token);
  events.lastId = "";
  events.open();
}

async function begin() {
  const given = /^#token=([^&]+)$/.exec(location.hash);
  if (given) {
    // Remove the token from the address bar and the history before using it.
    history.replaceState(null, "", location.pathname);
    try {
      await logIn(decodeURIComponent(given[1]));
    } catch (error) {
      showLogin(error.message);
    }
    return;
  }
  try {
    await get("/api/mailboxes");
    events.open();
  } catch (error) {
    if (error.isRefusal) showLogin("");
    else events.again();
  }
}

byId("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = byId("token");
  const token = field.value.trim();
  field.value = "";
  try {
    await logIn(token);
  } catch (error) {
    setText(byId("login-error"), error.message);
    field.focus();
  }
});

byId("logout").addEventListener("click", async () => {
  await logOut();
  showLogin("");
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input");
  if (event.key === "/" && !typing && !drawer.dialog.open && !byId("board").hidden) {
    event.preventDefault();
    byId("job-search").focus();
  } else if (event.key === "Escape" && typing === byId("job-search")) {
    byId("job-window").focus();
  }
});

window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) begin();
  else if (!byId("board").hidden) openAddressed();
});

// For measurements of the time from settled to painted.
window.trunkline = { store, jobs };
begin();
