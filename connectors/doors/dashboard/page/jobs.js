// The list of jobs. There may be ten thousand; only the visible rows are in the page.

import { age, button, count, make, now, setState, setText, shown, spans } from "/page/text.js";

const STATES = ["pending", "running", "completed", "error", "cancelled"];
const OVERSCAN = 6;

export class JobList {
  constructor(store, open) {
    this.store = store;
    this.open = open;
    this.window = document.getElementById("job-window");
    this.columns = document.getElementById("job-columns");
    this.space = document.getElementById("job-space");
    this.empty = document.getElementById("jobs-empty");
    this.total = document.getElementById("jobs-count");
    this.search = document.getElementById("job-search");
    this.visible = [];
    this.pool = new Map(); // by job id: the rows that are in the page
    this.selected = null;
    this.state = null;
    this.words = "";
    this.rowHeight = 40;
    this.top = { id: undefined, place: 0 }; // the first row in sight, when last drawn
    this.addFilters();
    this.window.addEventListener("scroll", () => this.store.changed("scroll"), { passive: true });
    this.window.addEventListener("keydown", (event) => this.key(event));
    this.window.addEventListener("click", (event) => this.click(event));
    this.window.addEventListener("focus", () => this.focused());
    this.search.addEventListener("input", () => this.choose({ words: this.search.value.trim().toLowerCase() }));
    new ResizeObserver(() => {
      this.measure();
      this.store.changed("scroll");
    }).observe(this.window);
    store.on("jobs", () => this.render());
    store.on("scroll", () => this.draw());
  }

  addFilters() {
    const group = document.getElementById("job-states");
    this.filters = new Map();
    for (const state of [null, ...STATES]) {
      const filter = button("", [state ?? "all", make("b")], () => this.choose({ state }));
      this.filters.set(state, filter);
      group.append(filter);
    }
  }

  // Show the jobs with another state or other words, from the newest.
  choose(wanted) {
    Object.assign(this, wanted);
    this.window.scrollTop = 0;
    this.store.changed("jobs");
  }

  render() {
    this.visible = this.chosen();
    this.keepInSight();
    const numberOf = (state) => this.store.jobCounts[state] ?? 0;
    const total = STATES.reduce((sum, state) => sum + numberOf(state), 0);
    setText(this.total, total ? count(total) : "");
    for (const [state, filter] of this.filters) {
      const number = state === null ? total : numberOf(state);
      setText(filter.lastChild, number ? count(number) : "");
      filter.setAttribute("aria-pressed", String(state === this.state));
      filter.hidden = state !== null && number === 0 && state !== this.state;
    }
    this.empty.hidden = this.visible.length > 0;
    const none = "No jobs yet. They appear here as soon as one is registered.";
    setText(this.empty, total ? "No job fits what you look for." : none);
    this.draw();
  }

  chosen() {
    const { jobs, order } = this.store;
    if (this.state === null && !this.words) return order;
    return order.filter((id) => {
      const job = jobs.get(id);
      if (this.state !== null && job.status !== this.state) return false;
      return !this.words || `${id} ${job.description} ${job.session ?? ""} ${job.last_detail ?? ""}`.toLowerCase().includes(this.words);
    });
  }

  // Keep the rows in sight where they are when new jobs come in above them.
  keepInSight() {
    const { id, place } = this.top;
    if (id === undefined || this.visible[place] === id) return;
    const found = this.visible.indexOf(id);
    if (found >= 0) {
      this.size();
      this.window.scrollTop += (found - place) * this.rowHeight;
    }
  }

  measure() {
    const found = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row")) || 40;
    if (found === this.rowHeight) return;
    this.rowHeight = found;
    for (const row of this.pool.values()) row.place = -1;
  }

  size() {
    this.space.style.height = `${this.visible.length * this.rowHeight}px`;
  }

  draw() {
    this.size();
    const top = Math.floor(this.window.scrollTop / this.rowHeight);
    this.top = { id: top ? this.visible[top] : undefined, place: top };
    const first = Math.max(0, top - OVERSCAN);
    const last = Math.min(
      this.visible.length,
      Math.ceil((this.window.scrollTop + this.window.clientHeight) / this.rowHeight) + OVERSCAN,
    );
    const wanted = new Set(this.visible.slice(first, last));
    for (const [id, row] of this.pool) {
      if (!wanted.has(id)) {
        this.pool.delete(id);
        row.element.remove();
      }
    }
    for (let place = first; place < last; place += 1) this.drawRow(place);
    this.window.setAttribute("aria-activedescendant", this.pool.has(this.selected) ? `job-${this.selected}` : "");
  }

  drawRow(place) {
    const id = this.visible[place];
    const job = this.store.jobs.get(id);
    let row = this.pool.get(id);
    if (!row) {
      row = newRow(id);
      this.pool.set(id, row);
      this.space.append(row.element);
    }
    if (row.place !== place) {
      row.place = place;
      row.element.style.transform = `translateY(${place * this.rowHeight}px)`;
      row.element.setAttribute("aria-posinset", String(place + 1));
    }
    row.element.setAttribute("aria-setsize", String(this.visible.length));
    row.element.setAttribute("aria-selected", String(id === this.selected));
    if (row.job !== job) {
      row.job = job;
      setState(row.state, job.status);
      setText(row.description, job.description || "(no description)");
      row.description.title = shown(job.description);
      setText(row.kind, (job.last_event ?? "").replaceAll("_", " "));
      setText(row.detail, job.last_detail ?? "");
      setText(row.session, job.session ?? "");
    }
    setText(row.age, age(now() - (job.ended_ms ?? job.started_ms ?? job.registered_ms)));
  }

  focused() {
    if (this.selected === null && this.visible.length) {
      const top = Math.ceil(this.window.scrollTop / this.rowHeight);
      this.select(this.visible[Math.min(top, this.visible.length - 1)]);
    }
  }

  select(id) {
    this.selected = id;
    const place = this.visible.indexOf(id);
    const top = place * this.rowHeight;
    const height = this.window.clientHeight - this.columns.offsetHeight;
    if (top < this.window.scrollTop) this.window.scrollTop = top;
    else if (top + this.rowHeight > this.window.scrollTop + height) this.window.scrollTop = top + this.rowHeight - height;
    this.draw();
  }

  key(event) {
    if (!this.visible.length || event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.window.clientHeight / this.rowHeight) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && this.selected) {
      event.preventDefault();
      this.open(this.selected);
    } else if (event.key in steps) {
      event.preventDefault();
      const known = this.visible.indexOf(this.selected);
      const next = Math.min(this.visible.length - 1, Math.max(0, (known < 0 ? -1 : known) + steps[event.key]));
      this.select(this.visible[next]);
    }
  }

  click(event) {
    const element = event.target.closest(".job");
    if (!element) return;
    const id = element.id.slice("job-".length);
    this.select(id);
    this.open(id);
  }
}

function newRow(id) {
  const cells = spans({
    state: "state",
    description: "said",
    kind: "kind",
    detail: "said",
    session: "job-session said",
    age: "job-age",
  });
  const name = make("span", "job-name", [make("span", "mono", id), cells.description]);
  const last = make("span", "job-last", [cells.kind, cells.detail]);
  const element = make("div", "job", [cells.state, name, last, cells.session, cells.age]);
  element.id = `job-${id}`;
  element.setAttribute("role", "option");
  return { element, ...cells, job: null, place: -1 };
}
