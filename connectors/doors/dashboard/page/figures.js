// The row of figures at the top: how many records are settled, how far live view and tables are behind.

import { age, count, duration, make, setText, svg } from "/page/text.js";

const SHOWN = 120;
const WIDTH = 120;
const HEIGHT = 34;
// Above these limits a figure is marked as an alarm.
const LIVE_LAG_MS = 2000;
const TABLES_MS = 60000;

const FIGURES = [
  {
    name: "Settled",
    value: (p) => p.settled_per_s,
    text: (p) => [p.settled_per_s < 10 ? String(p.settled_per_s) : count(Math.round(p.settled_per_s)), "/s"],
    note: (p, store) => `${inMinute(store, (one) => one.accepted + one.duplicate + one.rejected)} in a minute`,
  },
  {
    name: "Live view lag",
    value: (p) => p.live_lag_ms,
    text: (p) => duration(p.live_lag_ms).split(" "),
    note: (p) => (p.kafka_is_away ? "Kafka is away" : `${count(p.live_lag_records)} records behind`),
    alarm: (p) => p.kafka_is_away || p.live_lag_ms > LIVE_LAG_MS,
  },
  {
    name: "Tables behind",
    value: (p) => p.tables_behind_ms ?? 0,
    text: (p) => (p.tables_behind_ms === null ? ["no tables", ""] : duration(p.tables_behind_ms).split(" ")),
    note: (p) => (p.tables_behind_records === null ? "streams has not run yet" : `${count(p.tables_behind_records)} records to go`),
    alarm: (p) => (p.tables_behind_ms ?? 0) > TABLES_MS,
  },
  {
    name: "Unread messages",
    value: (p) => p.messages,
    text: (p) => [count(p.messages), p.messages === 1 ? "message" : "messages"],
    note: (p, store) => oldest(store),
  },
  {
    name: "Rejected",
    value: (p) => p.rejected,
    text: (p, store) => [inMinute(store, (one) => one.rejected), "in a minute"],
    note: (p, store) => latency(store),
  },
];

function inMinute(store, value) {
  return count(store.pulses.slice(-60).reduce((sum, one) => sum + value(one), 0));
}

function oldest(store) {
  const moments = store.mailboxes.mailboxes.map((box) => box.oldest_ms).filter((ms) => ms !== null);
  return moments.length && store.pulse ? `oldest for ${age(store.pulse.at_ms - Math.min(...moments))}` : "";
}

function latency(store) {
  const recent = store.latencies.slice(-200).sort((one, other) => one - other);
  return recent.length ? `this page follows in ${duration(Math.max(0, recent[recent.length >> 1]))}` : "";
}

export class Figures {
  constructor(store) {
    this.store = store;
    this.tiles = FIGURES.map((figure) => newTile(figure));
    document.getElementById("figures").append(...this.tiles.map((tile) => tile.element));
    this.drawnAt = null;
    store.on("figures", () => this.render());
  }

  render() {
    const { pulse, pulses } = this.store;
    if (!pulse || this.drawnAt === pulse) return;
    this.drawnAt = pulse;
    const recent = pulses.slice(-SHOWN);
    for (const { figure, element, number, unit, note, plot } of this.tiles) {
      const [text, of] = figure.text(pulse, this.store);
      setText(number, text);
      setText(unit, of);
      setText(note, figure.note(pulse, this.store));
      element.dataset.alarm = String(figure.alarm?.(pulse) ?? false);
      draw(plot, recent.map(figure.value));
    }
  }
}

function newTile(figure) {
  const element = make("div", "figure");
  const number = document.createTextNode("–");
  const unit = make("small");
  const note = make("p", "figure-note");
  const frame = { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const plot = svg("svg", frame, svg("path", { class: "area" }), svg("path", { class: "stroke" }));
  const value = make("p", "figure-value", [number, unit]);
  element.append(make("p", "figure-name", figure.name), value, note, plot);
  return { figure, element, number, unit, note, plot };
}

// Draw the values with the newest at the right. Where there are no values yet, nothing is drawn.
function draw(plot, values) {
  const top = Math.max(...values, 1);
  const step = WIDTH / (SHOWN - 1);
  const start = WIDTH - (values.length - 1) * step;
  const points = values.map((value, place) => {
    const x = (start + place * step).toFixed(1);
    return `${x} ${(HEIGHT - 1 - (value / top) * (HEIGHT - 4)).toFixed(1)}`;
  });
  const line = `M${points.join("L")}`;
  plot.firstChild.setAttribute("d", `${line}L${WIDTH} ${HEIGHT}L${start.toFixed(1)} ${HEIGHT}Z`);
  plot.lastChild.setAttribute("d", line);
}
