"""Mosquitto's ACL file.

The rules of roles and jobs come from the template `conf/mosquitto.acl`. Each agent has a block of its own, and
so has each user of a job whose secret was rotated. A pattern cannot express their rules, because it knows only
the whole user name (`agent.<name>` or `<job id>.<tag>`) and no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Final

from connectors.mqtt_accounts.mqtt_password_file import ACL, write_lines
from connectors.mqtt_link.topics import events_topic, inbox_topic, outbox_topic, receipts_topic
from schemas.errors import UsageError
from schemas.keys.mqtt_password import job_of_rotated_user
from schemas.settings.settings import PROJECT_ROOT, MqttSettings
from schemas.streams.agents.mqtt_agents import agent_of_user

_TEMPLATE: Final = PROJECT_ROOT / "conf" / "mosquitto.acl"


def check_prefixes(mqtt: MqttSettings) -> None:
    """Raise UsageError for a topic prefix that cannot be written in an ACL file."""
    for name, prefix in (("topic_prefix", mqtt.topic_prefix), ("agents_prefix", mqtt.agents_prefix)):
        if not prefix.isprintable():
            raise UsageError(f"mqtt.{name} has a control character, which cannot be in an ACL file")


def write_acl(folder: Path, mqtt: MqttSettings, users: Iterable[str]) -> None:
    """Replace the ACL file, mode 0600, unless it is right already. `users` are those of the password file."""
    path, wanted = folder / ACL, _text(mqtt, users)
    try:
        known = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        known = ""
    if known == wanted:
        path.chmod(0o600)
    else:
        write_lines(path, wanted.splitlines())


def _text(mqtt: MqttSettings, users: Iterable[str]) -> str:
    values = {"prefix": mqtt.topic_prefix, "agents_prefix": mqtt.agents_prefix}
    agents, rotated = [], []
    for user in users:
        if (agent := agent_of_user(user)) is not None:
            topics = inbox_topic(mqtt.agents_prefix, agent), outbox_topic(mqtt.agents_prefix, agent)
            agents.append((agent, _block(mqtt, user, *topics)))
        elif (job_id := job_of_rotated_user(user)) is not None:
            topics = receipts_topic(mqtt.topic_prefix, job_id), events_topic(mqtt.topic_prefix, job_id)
            rotated.append((user, _block(mqtt, user, *topics)))
    text = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(values)
    return text + "".join(block for _, block in sorted(agents) + sorted(rotated))


def _block(mqtt: MqttSettings, user: str, reads: str, writes: str) -> str:
    # The template's patterns for jobs apply to every account, so also to this one.
    as_a_job = f"{mqtt.topic_prefix}/{user}/#"
    lines = (f"user {user}", f"topic read {reads}", f"topic write {writes}", f"topic deny {as_a_job}")
    return "\n" + "".join(f"{line}\n" for line in lines)
