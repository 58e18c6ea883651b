// Text and elements. Text of agents gets into the page only here: as text, never as markup.

// Control and format characters (ANSI, bidirectional overrides, zero width), line ends that are no line feed,
// private and unassigned ones, lone surrogates: shown as escapes, never obeyed.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/gu;
const HIDDEN_BUT_LINES = /(?!\n)[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/gu;

function escape(character) {
  const code = character.codePointAt(0);
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\u{${code.toString(16)}}`;
}

export function shown(text) {
  return text === null || text === undefined ? "" : String(text).replace(HIDDEN, escape);
}

function shownLines(text) {
  return String(text).replace(HIDDEN_BUT_LINES, escape);
}

// An element with classes, and a child or an array of children. Text goes through `shown`.
export function make(tag, classes = "", content = []) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  for (const child of [content].flat()) element.append(child instanceof Node ? child : shown(child));
  return element;
}

// Empty spans by name, from their classes by name.
export function spans(classes) {
  return Object.fromEntries(Object.entries(classes).map(([name, value]) => [name, make("span", value)]));
}

// A button that calls `pressed` when it is clicked.
export function button(classes, content, pressed) {
  const element = make("button", classes, content);
  element.type = "button";
  element.addEventListener("click", pressed);
  return element;
}

// An SVG element with attributes and children.
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Text that an agent or a person wrote, isolated from the direction of the text around it.
export function said(text, classes = "") {
  return make("span", `said ${classes}`.trim(), text);
}

// A list of names with their values: elements or texts. Names without a value are left out.
export function facts(pairs) {
  const list = make("dl", "facts");
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "") continue;
    list.append(make("dt", "", name), make("dd", "", value));
  }
  return list;
}

// A block of text of several lines, or a remark that there is none. It keeps the focus if it is drawn again.
export function block(text, key) {
  if (text === null) return make("p", "step-note", "Nothing that may be shown to you.");
  const found = make("pre", "block mono said");
  found.textContent = shownLines(text);
  found.tabIndex = 0;
  found.dataset.key = key;
  return found;
}

// A row of a list that can be pressed: a name, a figure, and a note below them.
export function row(name, figure, note, pressed) {
  return button("row", [make("span", "row-name said", name), figure, make("span", "row-note said", note)], pressed);
}

// A text that can be pressed. It keeps the focus if it is drawn again.
export function linkTo(key, text, pressed) {
  const link = button("link", said(text), pressed);
  link.dataset.key = key;
  return link;
}

export function setText(element, text) {
  const safe = shown(text);
  if (element.textContent !== safe) element.textContent = safe;
}

export function state(name) {
  const element = make("span", "state");
  setState(element, name);
  return element;
}

export function setState(element, name) {
  if (element.dataset.state === name) return;
  element.dataset.state = name;
  element.textContent = shown(name);
}

export const count = new Intl.NumberFormat("en").format;

export function duration(ms) {
  const s = Math.max(0, ms) / 1000;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 100) return `${Math.round(s)} s`;
  if (s < 6000) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}

// A duration without milliseconds, for values that change once a second.
export function age(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  if (s < 100) return `${s} s`;
  return duration(ms);
}

// The time that is left, to the second: 41 s, 5:03 min, 1:02:03 h.
export function countdown(ms) {
  const s = Math.max(0, Math.ceil(ms / 1000));
  if (s < 100) return `${s} s`;
  const two = (number) => String(number).padStart(2, "0");
  const minutes = Math.floor(s / 60);
  if (s < 3600) return `${minutes}:${two(s % 60)} min`;
  return `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(s % 60)} h`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function moment(ms) {
  if (ms === null || ms === undefined) return "";
  const time = new Date(ms);
  return time.toDateString() === new Date().toDateString() ? CLOCK.format(time) : DAY.format(time);
}

let skewMs = 0;

// Follow the server's clock, so that ages are right although this machine's clock is wrong.
export function setClock(serverMs) {
  const found = serverMs - Date.now();
  skewMs = Math.abs(found) > 2000 ? found : 0;
}

export function now() {
  return Date.now() + skewMs;
}
