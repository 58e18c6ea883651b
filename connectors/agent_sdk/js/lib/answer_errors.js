// The errors that belong to the gateway's answers, and the time that an answer asks to wait.
//
// The library for Python has the same table and forms. Both are tested with ../vectors/hub.json.

import {
  BackboneUnreachable,
  MessageRejected,
  NotFound,
  RateLimited,
  Refused,
  TrunklineError,
  UsageError,
} from "./errors.js";

const MESSAGE_LIMIT = 600;
// As `isprintable` of Python has it.
const UNPRINTABLE = /(?! )[\p{C}\p{Z}]/gu;
const LAUNCH_FAILED = "launch_failed";
const REJECTIONS = ["seq_conflict", "policy"];
const KINDS = {
  400: UsageError,
  401: Refused,
  403: Refused,
  404: NotFound,
  408: BackboneUnreachable,
  409: Refused,
  410: NotFound,
  413: UsageError,
  415: UsageError,
  422: UsageError,
  502: BackboneUnreachable,
  503: BackboneUnreachable,
  504: BackboneUnreachable,
};
const NEW_TOKEN = "the token is not valid, or has expired: get a new one";

const MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec";
const CLOCK = "(?<hour>\\d\\d):(?<minute>\\d\\d):(?<second>\\d\\d)";
// IMF-fixdate, RFC 850 with two digits for the year, and asctime. Some servers write another zone than GMT.
const ZONE = " (?:GMT|UTC|Z|(?<zone>[-+]\\d{4}))";
const FORMS = [
  `[A-Z][a-z]{2}, (?<day>\\d\\d?) (?<month>[A-Z][a-z]{2}) (?<year>\\d{4}) ${CLOCK}${ZONE}`,
  `[A-Z][a-z]{5,8}, (?<day>\\d\\d)-(?<month>[A-Z][a-z]{2})-(?<year>\\d\\d) ${CLOCK}${ZONE}`,
  `[A-Z][a-z]{2} (?<month>[A-Z][a-z]{2}) (?<day>[ \\d]\\d) ${CLOCK} (?<year>\\d{4})`,
].map((form) => new RegExp(`^${form}$`));
const YEARS_AHEAD = 50;

/**
 * Return the error of an answer without success.
 *
 * `isMessage`: the request sends a message. It is MessageRejected if the message itself was refused.
 */
export function errorOf(answer, { isMessage = false } = {}) {
  const { status } = answer;
  const reason = reasonOf(answer);
  const text = messageOf(answer, reason);
  if (status === 429) return new RateLimited(text, { reason, retryAfterS: retryAfterS(answer.headers) });
  const kind = status === 502 && reason === LAUNCH_FAILED ? Refused : KINDS[status];
  if (kind === undefined) return new TrunklineError(`the gateway answered ${status}: ${text}`, { reason });
  if (isMessage && kind === Refused && REJECTIONS.includes(reason)) return new MessageRejected(text, { reason });
  return new kind(text, { reason, ...(status === 401 ? { advice: NEW_TOKEN } : {}) });
}

/** Return the reason code of an answer, or undefined. */
export function reasonOf(answer) {
  try {
    const { reason } = JSON.parse(answer.body.toString("utf8"));
    return typeof reason === "string" ? reason : undefined;
  } catch {
    return undefined;
  }
}

/** Return the first `most` characters of a text, with a mark for each that a terminal obeys or does not show. */
export function printable(text, most = MESSAGE_LIMIT, mark = "\ufffd") {
  return [...String(text).replace(UNPRINTABLE, mark)].slice(0, most).join("");
}

/**
 * Return the seconds that an answer asks to wait, null without `Retry-After` or with one that cannot be read.
 *
 * It has seconds, or a moment in one of the three forms of RFC 9110, all in UTC. A moment is compared with that of
 * the header `Date`, so the clocks of the two sides need not agree.
 */
export function retryAfterS(headers, nowMs = Date.now()) {
  const given = (headers["retry-after"] ?? "").trim();
  // More than RFC 9110 allows: a server that writes a float means it.
  if (given === "inf") return Infinity;
  if (/^[0-9]+(\.[0-9]+)?(e[0-9]+)?$/.test(given)) return Number(given);
  const until = httpDateMs(given, nowMs);
  if (until === null) return null;
  return Math.max(0, (until - (httpDateMs(headers.date ?? "", nowMs) ?? nowMs)) / 1000);
}

function httpDateMs(text, nowMs) {
  const found = FORMS.map((form) => form.exec(text.trim())).find((match) => match !== null);
  if (found === undefined) return null;
  const { day, month, hour, minute, second, zone = "+0000" } = found.groups;
  const present = new Date(nowMs).getUTCFullYear();
  let year = Number(found.groups.year);
  if (year < 100) {
    year += present - (present % 100);
    if (year > present + YEARS_AHEAD) year -= 100;
  }
  const place = MONTHS.indexOf(month) / 3;
  const fields = [year, place, Number(day), Number(hour), Number(minute), Math.min(Number(second), 59)];
  const moment = new Date(Date.UTC(...fields));
  // A date that does not exist becomes another one.
  const again = [moment.getUTCFullYear(), moment.getUTCMonth(), moment.getUTCDate(), moment.getUTCHours()];
  if (again.some((value, index) => value !== fields[index]) || fields[4] > 59) return null;
  const offsetMinutes = Number(zone.slice(1, 3)) * 60 + Number(zone.slice(3));
  return moment.getTime() - Number(`${zone[0]}1`) * offsetMinutes * 60_000;
}

function messageOf(answer, reason) {
  let text;
  try {
    text = JSON.parse(answer.body.toString("utf8")).message;
  } catch {
    text = null;
  }
  if (typeof text !== "string" || text === "") text = `HTTP status ${answer.status}`;
  const shown = reason !== undefined && !text.includes(reason) ? `${text} (${reason})` : text;
  return printable(shown);
}
