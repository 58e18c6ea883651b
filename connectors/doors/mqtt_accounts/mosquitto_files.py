"""Mosquitto's password file and ACL file, and the signal that lets the broker read them again.

A line of the password file is `<user>:$7$<iterations>$<salt>$<hash>`, PBKDF2 with SHA-512. All our passwords
have 256 random bits, so stretching adds nothing, and one iteration is right. Mosquitto checks the password of
every connected client again at each reload. For 900 clients that took 86 ms with 101 iterations and 7 ms with
one.

The ACL rules of roles and jobs come from the template `conf/mosquitto.acl`. Each agent has a block of its own,
and so has each user of a job whose secret was rotated. A pattern cannot express their rules, because it knows
only the whole user name (`agent.<name>` or `<job id>.<tag>`) and no part of it.

A paused user has a block with a `topic deny` rule for the topic on which it publishes. Mosquitto checks the
`deny` rules of a user first, and its rules before the patterns. So the rule counts wherever it is in the file.
`AccountPauses` knows which owners are paused now, and until when (LM-10).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Final

import psutil

from schemas.settings.settings import PROJECT_ROOT, MqttSettings
from trunkline_agent.errors import UsageError
from trunkline_agent.wire.agent_message import agent_of_user
from trunkline_agent.wire.mqtt_password import job_of_rotated_user
from trunkline_agent.wire.topics import events_topic, inbox_topic, outbox_topic, receipts_topic

_SCHEME: Final = "7"
_ITERATIONS: Final = 1
_SALT_BYTES: Final = 12
PASSWORDS: Final = "passwords"
ACL: Final = "acl"
PID: Final = "mosquitto.pid"
_TEMPLATE: Final = PROJECT_ROOT / "conf" / "mosquitto.acl"


def password_line(user: str, password: str) -> str:
    """Return the line of Mosquitto's password file for one account: the user name and the salted hash.

    The line has no line end. Each call uses a new random salt, so the same password gives another line each
    time.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    parts = (_SCHEME, str(_ITERATIONS), _b64(salt), _b64(_digest(password, salt, _ITERATIONS)))
    return f"{user}:${'$'.join(parts)}"


def line_fits(line: str, user: str, password: str) -> bool:
    """Return whether `line`, a line of Mosquitto's password file, is for `user` and matches `password`.

    False for another user or password, for a malformed line, and for a hash scheme other than `$7$`.
    """
    name, _, rest = line.partition(":")
    parts = rest.split("$")
    if name != user or len(parts) != 5 or parts[:2] != ["", _SCHEME]:
        return False
    try:
        iterations, salt, digest = int(parts[2]), *(base64.b64decode(p, validate=True) for p in parts[3:])
    except (ValueError, binascii.Error):
        return False
    return iterations > 0 and hmac.compare_digest(_digest(password, salt, iterations), digest)


def read_lines(path: Path) -> dict[str, str]:
    """Read Mosquitto's password file `path` and return its lines, without line ends, by user name.

    Returns an empty dict when the file does not exist. Lines without a colon are skipped. Raises OSError when
    the file cannot be read, and UnicodeDecodeError when it is not ASCII.
    """
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        return {}
    return {line.partition(":")[0]: line for line in text.splitlines() if ":" in line}


def with_roles(lines: Mapping[str, str], passwords: Mapping[str, str]) -> dict[str, str]:
    """Return the lines of Mosquitto's password file with a correct line for each role, such as `bridge`.

    A line that matches the role's password is kept. A missing or wrong line is replaced by a new one. No file
    is read or written.

    Args:
        lines: the present lines by user name, as `read_lines` returns them. They are copied, not changed.
        passwords: the password of each role in clear text. The name of a role is its user name.
    """
    found = dict(lines)
    for user, password in passwords.items():
        if not line_fits(found.get(user, ""), user, password):
            found[user] = password_line(user, password)
    return found


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the text file `path` by these lines, with mode 0600.

    Each line gets a line end. A temporary file in the same folder is written and renamed, so a reader never
    sees half of the file. A missing folder is created. Raises OSError when the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(f"{line}\n" for line in lines)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def reload_broker(folder: Path) -> bool:
    """Send SIGHUP to the local Mosquitto, so that it reads its password and ACL files again.

    Args:
        folder: the folder with the broker's file `mosquitto.pid`.

    Returns:
        True when the signal was sent. The broker may read the files a little later. False when no broker runs,
        or when it is still starting and does not handle the signal yet.
    """
    try:
        process = psutil.Process(int((folder / PID).read_text(encoding="ascii")))
        # Another program may have the id now, and a broker that is still starting would die of the signal.
        if not process.name().startswith("mosquitto") or not _handles_hangup(process.pid):
            return False
        process.send_signal(signal.SIGHUP)
    except (OSError, ValueError, psutil.Error):
        return False
    return True


def _handles_hangup(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (signal.SIGHUP - 1) & 1)
    return False


def _digest(password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha512", password.encode("utf-8"), salt, iterations)


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def check_prefixes(mqtt: MqttSettings) -> None:
    """Raise UsageError when `mqtt.topic_prefix` or `mqtt.agents_prefix` contains a control character.

    Such a prefix cannot be written in Mosquitto's ACL file.
    """
    for name, prefix in (("topic_prefix", mqtt.topic_prefix), ("agents_prefix", mqtt.agents_prefix)):
        if not prefix.isprintable():
            raise UsageError(f"mqtt.{name} has a control character, which cannot be in an ACL file")


def write_acl(
    folder: Path, mqtt: MqttSettings, users: Iterable[str], paused: Collection[str] = frozenset()
) -> None:
    """Write Mosquitto's ACL file for these users, with mode 0600.

    A file with the right content is kept. The broker applies the file after `reload_broker`. Raises OSError
    when the file or its template cannot be read or written.

    Args:
        folder: the folder of the ACL file, which is named `acl`.
        mqtt: the topic prefixes.
        users: the user names in the password file. Agents, and jobs whose secret was rotated, get rules of
            their own. The template's rules apply to all others.
        paused: those of the users that may publish nothing now. They keep the right to read.
    """
    path, wanted = folder / ACL, _text(mqtt, users, paused)
    try:
        known = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        known = ""
    if known == wanted:
        path.chmod(0o600)
    else:
        write_lines(path, wanted.splitlines())


def _text(mqtt: MqttSettings, users: Iterable[str], paused: Collection[str]) -> str:
    values = {"prefix": mqtt.topic_prefix, "agents_prefix": mqtt.agents_prefix}
    agents, rotated, jobs = [], [], []
    for user in users:
        is_paused = user in paused
        if (agent := agent_of_user(user)) is not None:
            topics = inbox_topic(mqtt.agents_prefix, agent), outbox_topic(mqtt.agents_prefix, agent)
            agents.append((agent, _block(mqtt, user, *topics, is_paused=is_paused)))
        elif (job_id := job_of_rotated_user(user)) is not None:
            topics = receipts_topic(mqtt.topic_prefix, job_id), events_topic(mqtt.topic_prefix, job_id)
            rotated.append((user, _block(mqtt, user, *topics, is_paused=is_paused)))
        elif is_paused:
            jobs.append((user, f"\nuser {user}\ntopic deny {events_topic(mqtt.topic_prefix, user)}\n"))
    text = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(values)
    return text + "".join(block for _, block in sorted(agents) + sorted(rotated) + sorted(jobs))


def _block(mqtt: MqttSettings, user: str, reads: str, writes: str, *, is_paused: bool) -> str:
    # The template's patterns for jobs apply to every account, so also to this one.
    as_a_job = f"{mqtt.topic_prefix}/{user}/#"
    lines = (f"user {user}", f"topic read {reads}", f"topic write {writes}", f"topic deny {as_a_job}")
    pause = (f"topic deny {writes}",) if is_paused else ()
    return "\n" + "".join(f"{line}\n" for line in (*lines, *pause))


class AccountPauses:
    """The pauses of the owners of accounts. Not thread-safe.

    Attributes:
        applied: the owners that were paused at the last call of `turn`.

    Args:
        clock: returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, float] = {}
        self.applied: frozenset[str] = frozenset()

    def pause(self, owner: str, seconds: float) -> None:
        """Pause an owner for so many seconds from now. A shorter pause does not end a longer one."""
        self._ends[owner] = max(self._ends.get(owner, 0.0), self._clock() + seconds)

    @property
    def has_new(self) -> bool:
        """True if a pause has begun since the last call of `turn`."""
        return not self._ends.keys() <= self.applied

    def next_end(self, default: float) -> float:
        """Return the time of the clock at which the first pause ends, or `default` if that is earlier."""
        return min(default, *self._ends.values()) if self._ends else default

    def turn(self) -> tuple[list[str], list[str]]:
        """Bring `applied` up to date. Return the owners whose pauses have begun, and those whose have ended."""
        now = self._clock()
        self._ends = {owner: end for owner, end in self._ends.items() if end > now}
        before, self.applied = self.applied, frozenset(self._ends)
        return sorted(self.applied - before), sorted(before - self.applied)
