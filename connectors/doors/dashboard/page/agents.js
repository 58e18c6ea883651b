// An agent, or a task, in the drawer.

import { openMailbox } from "/page/mailbox.js";
import { age, block, count, duration, facts, linkTo, make, moment, now, row, said, setText, shown, state } from "/page/text.js";

export function openAgent(drawer, name, back = null) {
  const open = () => openAgent(drawer, name, back);
  drawer.follow(`Agent ${shown(name)}`, `#agent/${name}`, back, {
    path: () => `/api/agents/${encodeURIComponent(name)}`,
    concerns(stream) {
      // A task's agent is not in the name of its stream, and tasks are few.
      return stream === `agent/${name}` || stream === `mailbox/default/${name}` || stream.startsWith("task/");
    },
    draw: (found) => drawer.fill(agentParts(drawer, found, open)),
  });
}

function agentParts(drawer, found, open) {
  const { agent, definition, mailbox, tasks } = found;
  const parts = [];
  if (agent?.task) parts.push(make("p", "lead said", agent.task));
  const task = agent?.task_id;
  parts.push(
    facts([
      ["Status", agent ? state(agent.status) : state(tasks.some((one) => one.status === "running") ? "working" : "not here")],
      ["Capabilities", names((agent ?? definition)?.capabilities)],
      ["Task", task && linkTo(`of ${task}`, task, () => openTask(drawer, task, open))],
      ["Joined", agent && `${moment(agent.started_ms)}, ${age(now() - agent.started_ms)} ago`],
      ["Changed", agent && moment(agent.updated_ms)],
      ["Stopped", agent?.stopped_ms && said([moment(agent.stopped_ms), agent.stopped_why].filter(Boolean).join(": "))],
      ["Definition", definition && definitionOf(definition)],
      ["Image", definition && said(definition.image)],
      ["Mailbox", mailboxLink(drawer, mailbox, open)],
    ]),
  );
  if (definition?.description) parts.push(make("p", "step-note said", definition.description));
  const shownTasks = tasks.length < found.total ? `newest ${count(tasks.length)} of ${count(found.total)}` : count(found.total);
  const title = make("h3", "", ["Tasks ", make("span", "count", shownTasks)]);
  title.id = "agent-tasks";
  parts.push(title);
  if (tasks.length) {
    const list = make("ul", "rows", tasks.map((one) => make("li", "", taskRow(drawer, one, open))));
    list.setAttribute("aria-labelledby", title.id);
    parts.push(list);
  } else parts.push(make("p", "step-note", "No task was given to it."));
  return parts;
}

function definitionOf(definition) {
  if (definition.is_defined) return `since ${moment(definition.defined_ms)}${definition.hardened ? ", hardened" : ""}`;
  return `removed ${moment(definition.removed_ms)}`;
}

function taskRow(drawer, task, open) {
  const note = [moment(task.submitted_ms), task.error].filter(Boolean).join(" · ");
  const found = row(task.description || "(no description)", state(task.status), note, () => openTask(drawer, task.task_id, open));
  found.dataset.key = task.task_id;
  return found;
}

function mailboxLink(drawer, box, open) {
  const text = `${count(box.waiting)} waiting, ${count(box.leased)} leased, ${count(box.dead)} dead`;
  return linkTo("mailbox", text, () => openMailbox(drawer, box.realm, box.recipient, open));
}

function names(capabilities) {
  return capabilities?.length ? said(capabilities.join(", ")) : null;
}

export function openTask(drawer, id, back = null) {
  const open = () => openTask(drawer, id, back);
  const ran = make("span");
  const expiry = make("span");
  const view = {
    path: () => `/api/tasks/${encodeURIComponent(id)}`,
    concerns: (stream) => stream === `task/${id}` || stream === `container/task-${id}` || isOfMailbox(stream),
    draw(found) {
      view.found = found;
      view.tick();
      drawer.fill(taskParts(drawer, found, open, ran, expiry));
    },
    tick() {
      const { task, token } = view.found ?? {};
      if (task?.started_ms) setText(ran, `${duration((task.ended_ms ?? now()) - task.started_ms)}${task.ended_ms ? "" : " so far"}`);
      if (token) setText(expiry, tokenText(token));
    },
  };
  const isOfMailbox = (stream) => {
    const box = view.found?.mailbox;
    return Boolean(box) && stream === `mailbox/${box.realm}/${box.recipient}`;
  };
  drawer.follow(`Task ${shown(id)}`, `#task/${id}`, back, view);
}

function tokenText(token) {
  if (token.status === "revoked") {
    return ["revoked", moment(token.revoked_ms), token.revoked_why].filter(Boolean).join(", ");
  }
  if (token.expiry_ms <= now()) return `expired, ${moment(token.expiry_ms)}`;
  return `active, for ${age(token.expiry_ms - now())} more`;
}

function taskParts(drawer, found, open, ran, expiry) {
  const { task, token, container, mailbox } = found;
  const parts = [
    make("p", "lead said", task.description || "(no description)"),
    facts([
      ["Status", state(task.status)],
      ["Agent", linkTo("agent", task.agent, () => openAgent(drawer, task.agent, open))],
      ["Submitted", said(`${moment(task.submitted_ms)} by ${task.submitted_by}`)],
      ["Started", task.started_ms && moment(task.started_ms)],
      ["Ended", task.ended_ms && moment(task.ended_ms)],
      ["Ran", task.started_ms ? ran : null],
      ["Capabilities", names(found.capabilities)],
      ["Token", token ? expiry : "none yet"],
      ["Session", task.session_name && said(task.session_name)],
      ["Image", task.image && said(task.image)],
      ["Container", container && [said(container.container, "mono"), " ", state(container.state)]],
      ["Runs on", container?.host && said(`${container.host}${container.port ? `, port ${container.port}` : ""}, ${container.backend}`)],
      ["Container failed", container?.error && said(container.error)],
      ["Mailbox", mailboxLink(drawer, mailbox, open)],
    ]),
  ];
  if (task.error) parts.push(make("h3", "", "Error"), block(task.error, "error"));
  if (found.result !== null) parts.push(make("h3", "", "Result"), block(found.result, "result"));
  return parts;
}
