// The data of the page. Listeners of a part are called when it has changed, at most once per painted frame.

// The page keeps at most this many jobs. Beyond that it drops the oldest jobs that have ended.
const JOBS_KEPT = 20000;
// The newest tasks.
const TASKS_KEPT = 100;
const PULSES_KEPT = 300;
const LATENCIES_KEPT = 2000;

export class Store {
  jobs = new Map();
  order = []; // job ids, newest first
  agents = new Map();
  tasks = new Map();
  mailboxes = { mailboxes: [], messages: 0, total: 0 };
  webhooks = { webhooks: [], total: 0 };
  reasons = [];
  pulses = [];
  jobCounts = {};
  pulse = null;
  listeners = new Map();
  dirty = new Set();
  settledAt = []; // of verdicts that are not painted yet
  latencies = []; // settled to painted, milliseconds

  on(part, listener) {
    this.listeners.set(part, listener);
  }

  changed(...parts) {
    if (!this.dirty.size) requestAnimationFrame(() => this.render());
    for (const part of parts) this.dirty.add(part);
  }

  render() {
    const parts = this.dirty;
    this.dirty = new Set();
    for (const part of parts) this.listeners.get(part)?.();
    if (this.settledAt.length) {
      const settled = this.settledAt;
      this.settledAt = [];
      // The message arrives after the frame of this callback has been painted.
      const channel = new MessageChannel();
      channel.port1.onmessage = () => this.painted(settled);
      channel.port2.postMessage(null);
    }
  }

  painted(settled) {
    const at = performance.timeOrigin + performance.now();
    for (const moment of settled) this.latencies.push(at - moment);
    if (this.latencies.length > LATENCIES_KEPT) this.latencies.splice(0, this.latencies.length - LATENCIES_KEPT);
  }

  clearJobs() {
    this.jobs.clear();
    this.order = [];
    this.changed("jobs");
  }

  takeJobs(rows) {
    for (const row of rows) {
      const known = this.jobs.get(row.job_id);
      if (known && known.offset > row.offset) continue;
      this.jobs.set(row.job_id, row);
      if (!known) this.place(row);
    }
    if (this.order.length > JOBS_KEPT) this.forgetOldest();
    this.changed("jobs");
  }

  place(row) {
    let low = 0;
    let high = this.order.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isNewer(row, this.jobs.get(this.order[middle]))) high = middle;
      else low = middle + 1;
    }
    this.order.splice(low, 0, row.job_id);
  }

  forgetOldest() {
    const surplus = this.order.length - JOBS_KEPT;
    const ended = this.order.filter((id) => this.jobs.get(id).ended_ms !== null);
    for (const id of ended.slice(-surplus)) this.jobs.delete(id);
    this.order = this.order.filter((id) => this.jobs.has(id));
  }

  takeAgents(rows, all = false) {
    if (all) this.agents.clear();
    for (const row of rows) {
      if (row.gone) this.agents.delete(row.key);
      else this.agents.set(row.key, row);
    }
    this.changed("agents");
  }

  takeTasks(rows, all = false) {
    if (all) this.tasks.clear();
    for (const row of rows) {
      const known = this.tasks.get(row.task_id);
      if (!known || known.offset <= row.offset) this.tasks.set(row.task_id, row);
    }
    if (this.tasks.size > TASKS_KEPT) {
      const newest = [...this.tasks.values()].sort((one, other) => other.submitted_ms - one.submitted_ms);
      for (const task of newest.slice(TASKS_KEPT)) this.tasks.delete(task.task_id);
    }
    this.changed("tasks");
  }

  takeMailboxes(found) {
    this.mailboxes = found;
    for (const agent of this.agents.values()) agent.waiting = 0;
    for (const box of found.mailboxes) {
      const agent = box.realm === "default" ? this.agents.get(box.recipient) : null;
      if (agent) agent.waiting = box.depth;
    }
    this.changed("mailboxes", "agents");
  }

  takeWebhooks(found) {
    this.webhooks = found;
    this.changed("webhooks");
  }

  takeMessages(messages) {
    const boxes = this.mailboxes.mailboxes;
    for (const message of messages) {
      const found = boxes.find((box) => box.realm === message.realm && box.recipient === message.to);
      const { depth, dead } = message;
      if (found) Object.assign(found, { depth, dead });
      else if (depth > 0 || dead > 0) {
        boxes.push({ realm: message.realm, recipient: message.to, depth, dead, oldest_ms: message.logged_ms });
        this.mailboxes.total += 1;
      }
    }
    this.changed("mailboxes");
  }

  takeVerdicts(verdicts) {
    for (const { verdict, reason, logged_ms } of verdicts) {
      this.settledAt.push(logged_ms);
      if (verdict !== "rejected") continue;
      const found = this.reasons.find((one) => one.reason === reason);
      if (found) Object.assign(found, { count: found.count + 1, last_ms: logged_ms });
      else this.reasons.push({ reason, count: 1, last_ms: logged_ms });
      this.changed("reasons");
    }
    if (this.settledAt.length > 5000) this.settledAt.splice(0, this.settledAt.length - 5000);
    this.changed("figures");
  }

  takePulse(pulse) {
    this.pulse = pulse;
    this.jobCounts = pulse.jobs;
    this.pulses.push(pulse);
    if (this.pulses.length > PULSES_KEPT) this.pulses.shift();
    this.takeMailboxes({ mailboxes: pulse.mailboxes, messages: pulse.messages, total: pulse.total });
    this.takeWebhooks(pulse.webhooks);
    this.reasons = pulse.reasons;
    this.changed("figures", "jobs", "agents", "tasks", "reasons");
  }
}

function isNewer(one, other) {
  if (one.registered_ms !== other.registered_ms) return one.registered_ms > other.registered_ms;
  return one.job_id > other.job_id;
}
