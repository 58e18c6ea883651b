"""Patterns of text that a job event's `detail` must not contain (JE-04), with examples, and masks that hide it.

The publisher refuses to send such a text. The ledger and the views mask it and secrets (CM-05). In doubt a text
passes: masking is a second line of defence behind the publisher's check, not a filter against attackers. An
attacker must not be able to slow the search down. Repetitions that could begin at every character are therefore
bounded, and a hostile mebibyte costs milliseconds.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from trunkline_agent.wire.strict_json import canonical

# Every `needs` contains one of these. A text without any of them is safe, and most details are such texts.
_ANY_NEEDED: Final = ("/", "=", ":", "\\", "~", "-", "gh", "xox", "AKIA", "AIza", "eyJ", "earer ", "EARER ")
MASK: Final = "[masked]"
DETAIL: Final = "detail"
AUTH_TOKEN: Final = "data.auth_token"  # noqa: S105  a field's name
WHOLE_VALUE: Final = "value"
# In bytes that are not JSON, an escape or another encoding may hide a word or a path (UTF-16 has zero bytes).
# A backslash or a zero byte is therefore enough to mask them.
_MAY_HIDE: Final = re.compile(rb"auth_token|\\|\0", re.IGNORECASE)


class UnsafePattern(NamedTuple):
    """One row of the table `PATTERNS`: a kind of text that an event's `detail` must not contain.

    Attributes:
        name: the name of the pattern, which error messages quote.
        expression: the regular expression to search for.
        needs: a text without any of these literals cannot match. They save most texts the slower search.
        unsafe: examples that must match.
        safe: similar texts that must not match.
    """

    name: str
    expression: str
    needs: tuple[str, ...]
    unsafe: tuple[str, ...]
    safe: tuple[str, ...]


PATTERNS: Final = (
    UnsafePattern(
        "posix_path",
        # Absolute, below a top directory that real systems have: `GET /api/x` and `3/10` are not paths.
        r"/(?<![\w.:/-]/)(?:home|root|etc|usr|var|tmp|opt|srv|mnt|media|proc|sys|dev|run|boot|lib|lib64|bin|sbin"
        r"|data|work|workspace|app|Users|Library|Applications|Volumes|System|private|nix|snap)(?![\w-])",
        ("/",),
        ("/etc/passwd", "wrote /home/ann/x.txt", "(/tmp/a)", "cwd=/root", "see:'/Users/bo/k'", "in /var"),
        ("GET /api/x", "3/10", "https://example.org/home/x", "a/tmp/b", "and/or", "/variance", "1 /2", "n/a"),
    ),
    UnsafePattern(
        "file_url",
        r"(?i)\bfile:/",
        (":/",),
        ("file:///srv/x", "FILE:/etc"),
        ("profile: /x", "file: done"),
    ),
    UnsafePattern(
        "windows_path",
        r"(?<![A-Za-z0-9])[A-Za-z]:[\\/](?!/)|\\\\[\w.$-]+\\\w",
        (":\\", ":/", "\\\\"),
        (r"C:\Users\x", "d:/data/y", r"\\server\share"),
        ("http://x", "ratio a:b", "at 10:30", r"a\nb", "C: drive"),
    ),
    UnsafePattern(
        "home_path",
        r"(?<![\w~])~(?:[A-Za-z_][\w-]*)?/",
        ("~",),
        ("~/notes", "~ann/x", "in ~/.ssh"),
        ("~10 min", "a~b", "approx ~ 5/6"),
    ),
    UnsafePattern(
        "environment_assignment",
        r"(?<![\w$])\$?[A-Z][A-Z0-9_]*=\S",
        ("=",),
        ("API_KEY=abc", "PATH=x", "export HOME=y", "$A=1"),
        ("retries=3", "A = b", "x=Y", "maxRetries=3", "E=", "camelCASE=1"),
    ),
    UnsafePattern(
        "password_or_token",
        r"(?i)\b(?:pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|auth(?:orization)?|bearer|credentials?)"
        r"\s*[:=]\s*['\"]?\S",
        (":", "="),
        ("password: hunter2", "token=abc", "api-key: x", "Authorization: Basic x", "pwd='x'"),
        ("token count 3", "passed: 4 tests", "secretary: Bo", "asks for a password", "author: Ann"),
    ),
    UnsafePattern(
        "bearer_token",
        r"(?i)\bbearer +(?=\S*[0-9._~+/=-])[A-Za-z0-9._~+/=-]{8,}",
        ("earer ", "EARER "),
        ("Bearer abcdefgh12", "bearer eyJhbGciOi.x"),
        ("the bearer of news", "bearer it", "bearer instruments"),
    ),
    UnsafePattern(
        "known_token_form",
        r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|sk-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}"
        r"|AKIA[0-9A-Z]{12,}|AIza[\w-]{20,}|glpat-[\w-]{16,}|eyJ[\w-]{8,300}\.eyJ[\w-]{8,})"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY",
        ("gh", "sk-", "xox", "AKIA", "AIza", "glpat-", "eyJ", "-----BEGIN "),
        (
            "ghp_abcdefghijklmnop1234",
            "sk-proj-abcdefghijklmnop",
            "AKIAABCDEFGHIJKLMNOP",
            "-----BEGIN RSA PRIVATE KEY",
        ),
        ("sk-1", "ghp_x", "task-list of everything here"),
    ),
    UnsafePattern(
        "url_credentials",
        r"\b[a-zA-Z][a-zA-Z0-9+.-]{0,30}://[^\s/@:]+:[^\s/@]+@",
        ("://",),
        ("https://ann:pw@example.org", "amqp://u:p@h"),
        ("https://example.org:8080/x@y", "mailto:ann@example.org"),
    ),
)

_COMPILED: Final = tuple((p.name, p.needs, re.compile(p.expression).search) for p in PATTERNS)


def unsafe_pattern(text: str) -> str | None:
    """Search `text` for paths, passwords, tokens and other text that an event's `detail` must not contain.

    Returns the name of the first pattern in `PATTERNS` that occurs in it, or None if the text is safe.
    """
    for literal in _ANY_NEEDED:
        if literal in text:
            break
    else:
        return None
    for name, needs, search in _COMPILED:
        for literal in needs:
            if literal in text and search(text) is not None:
                return name
    return None


def carries_token(document: dict[str, Any]) -> bool:
    """Return whether the decoded body of an event has the field `data.auth_token`, with a value of any type.

    This field is the sender's own secret. The fold rejects such an event as `secret_in_event`.
    """
    data = document.get("data")
    return type(data) is dict and "auth_token" in data


def mask_event(document: dict[str, Any]) -> tuple[str | None, bytes | None]:
    """Mask an unsafe `detail` and the field `data.auth_token` of a decoded event, in a copy of it.

    The mask is the text `[masked]`. A `detail` is unsafe if `unsafe_pattern` finds a path or a secret in it, or
    if it is an object or array. `document` itself does not change.

    Returns:
        The names of the masked fields, joined by commas, and the masked event as canonical JSON. `(None, None)`
        if the event has nothing to mask.
    """
    detail = document.get("detail")
    # The fold rejects a detail that is not text as malformed. Its content may be secret all the same.
    unsafe = unsafe_pattern(detail) is not None if type(detail) is str else isinstance(detail, dict | list)
    token = carries_token(document)
    if not unsafe and not token:
        return None, None
    shown = dict(document)
    names = []
    if unsafe:
        shown["detail"] = MASK
        names.append(DETAIL)
    if token:
        shown["data"] = {**document["data"], "auth_token": MASK}
        names.append(AUTH_TOKEN)
    return ",".join(names), canonical(shown)


def mask_opaque(value: bytes | None) -> tuple[str | None, bytes | None]:
    """Decide whether to mask bytes that could not be decoded as an event but may contain a secret.

    Args:
        value: the value of a Kafka record, or `None` if the record has none.

    Returns:
        `("value", b"[masked] <size> bytes")` if the bytes may contain a token, a path or another unsafe text:
        the whole value must be hidden. `(None, None)` if it may be shown or there is no value.
    """
    if value is None:
        return None, None
    text = value.decode("utf-8", "replace")
    if _MAY_HIDE.search(value) is None and unsafe_pattern(text) is None:
        return None, None
    return WHOLE_VALUE, f"{MASK} {len(value)} bytes".encode("ascii")
