// Patterns of text that an event's `detail` must not contain: paths, passwords, tokens. The backbone masks such a
// text. The table is that of the backbone, with `\w`, `\b` and `\s` for all of Unicode, as in Python.

const WORD = "[\\p{L}\\p{N}_]";
const NO_WORD_BEFORE = `(?<!${WORD})`;
const TOP_FOLDERS =
  "home|root|etc|usr|var|tmp|opt|srv|mnt|media|proc|sys|dev|run|boot|lib|lib64|bin|sbin|data|work|workspace|app" +
  "|Users|Library|Applications|Volumes|System|private|nix|snap";

const PATTERNS = [
  ["posix_path", `/(?<![\\p{L}\\p{N}_.:/\\-]/)(?:${TOP_FOLDERS})(?![\\p{L}\\p{N}_\\-])`, "u"],
  ["file_url", `${NO_WORD_BEFORE}file:/`, "iu"],
  ["windows_path", `(?<![A-Za-z0-9])[A-Za-z]:[\\\\/](?!/)|\\\\\\\\[\\p{L}\\p{N}_.$\\-]+\\\\${WORD}`, "u"],
  ["home_path", `(?<![\\p{L}\\p{N}_~])~(?:[A-Za-z_][\\p{L}\\p{N}_\\-]*)?/`, "u"],
  ["environment_assignment", "(?<![\\p{L}\\p{N}_$])\\$?[A-Z][A-Z0-9_]*=\\S", "u"],
  [
    "password_or_token",
    `${NO_WORD_BEFORE}(?:pass(?:word|wd|phrase)?|pwd|secret|token|api[_\\-]?key|auth(?:orization)?|bearer` +
      `|credentials?)\\s*[:=]\\s*['"]?\\S`,
    "iu",
  ],
  ["bearer_token", `${NO_WORD_BEFORE}bearer +(?=\\S*[0-9._~+/=\\-])[A-Za-z0-9._~+/=\\-]{8,}`, "iu"],
  [
    "known_token_form",
    `${NO_WORD_BEFORE}(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_${WORD}{16,}|sk-[A-Za-z0-9_\\-]{16,}` +
      `|xox[abprs]-[A-Za-z0-9\\-]{10,}|AKIA[0-9A-Z]{12,}|AIza[\\p{L}\\p{N}_\\-]{20,}|glpat-[\\p{L}\\p{N}_\\-]{16,}` +
      `|eyJ[\\p{L}\\p{N}_\\-]{8,300}\\.eyJ[\\p{L}\\p{N}_\\-]{8,})|-----BEGIN [A-Z ]*PRIVATE KEY`,
    "u",
  ],
  ["url_credentials", `${NO_WORD_BEFORE}[a-zA-Z][a-zA-Z0-9+.\\-]{0,30}://[^\\s/@:]+:[^\\s/@]+@`, "u"],
].map(([name, expression, flags]) => [name, new RegExp(expression, flags)]);

/** Return the name of the first pattern that occurs in the text, or null if the text is safe. */
export function unsafePattern(text) {
  for (const [name, expression] of PATTERNS) {
    if (expression.test(text)) return name;
  }
  return null;
}

/** Return the name of the type of what was thrown. Its text may have a secret, its type has none. */
export function typeName(thrown) {
  return (thrown === null ? "" : thrown?.constructor?.name) || "Error";
}
