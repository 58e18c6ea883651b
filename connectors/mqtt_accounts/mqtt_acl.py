"""Mosquitto's ACL file: the roles and jobs by the template `conf/mosquitto.acl`, and a block for each agent and
for each user of a job whose secret was rotated.

A pattern cannot say what these may do: it knows the whole user name, `agent.<name>` or `<job id>.<tag>`, and no
part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Final

from connectors.mqtt_accounts.mqtt_password_file import ACL, write_lines
from connectors.mqtt_link.topics import events_topic, inbox_topic, outbox_topic, receipts_topic
from schemas.errors import UsageError
from schemas.keys.mqtt_password import job_of_rotated_user
from schemas.settings.settings import PROJECT_ROOT, MqttSettings
from schemas.streams.agents.mqtt_agents import agent_of_user, mqtt_user

_TEMPLATE: Final = PROJECT_ROOT / "conf" / "mosquitto.acl"


def check_prefixes(mqtt: MqttSettings) -> None:
    """Raise UsageError for a prefix that an ACL file cannot hold."""
    for name, prefix in (("topic_prefix", mqtt.topic_prefix), ("agents_prefix", mqtt.agents_prefix)):
        if not prefix.isprintable():
            raise UsageError(f"mqtt.{name} has a control character, which an ACL file cannot hold")


def agents_with_accounts(users: Iterable[str] | Mapping[str, str]) -> list[str]:
    """The agents among the users of a password file, by name."""
    return sorted(name for user in users if (name := agent_of_user(user)) is not None)


def rotated_users(users: Iterable[str] | Mapping[str, str]) -> list[str]:
    """Those of jobs whose secret was rotated among the users of a password file."""
    return sorted(user for user in users if job_of_rotated_user(user) is not None)


def write_acl(folder: Path, mqtt: MqttSettings, agents: Iterable[str], rotated: Iterable[str] = ()) -> bool:
    """Replace the ACL file, mode 0600, if it says something else. `rotated`: as from `rotated_users`. Returns
    whether it did.
    """
    path, wanted = folder / ACL, _text(mqtt, agents, rotated)
    try:
        known = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        known = ""
    if known == wanted:
        path.chmod(0o600)
        return False
    write_lines(path, wanted.splitlines())
    return True


def _text(mqtt: MqttSettings, agents: Iterable[str], rotated: Iterable[str]) -> str:
    values = {"prefix": mqtt.topic_prefix, "agents_prefix": mqtt.agents_prefix}
    text = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(values)
    blocks = [_agent_block(mqtt, agent) for agent in sorted(agents)]
    return text + "".join((*blocks, *(_job_block(mqtt, user) for user in sorted(rotated))))


def _agent_block(mqtt: MqttSettings, agent: str) -> str:
    prefix = mqtt.agents_prefix
    return _block(mqtt, mqtt_user(agent), inbox_topic(prefix, agent), outbox_topic(prefix, agent))


def _job_block(mqtt: MqttSettings, user: str) -> str:
    prefix, job_id = mqtt.topic_prefix, str(job_of_rotated_user(user))
    return _block(mqtt, user, receipts_topic(prefix, job_id), events_topic(prefix, job_id))


def _block(mqtt: MqttSettings, user: str, reads: str, writes: str) -> str:
    # The patterns for jobs hold for every account, so also for this one.
    as_a_job = f"{mqtt.topic_prefix}/{user}/#"
    lines = (f"user {user}", f"topic read {reads}", f"topic write {writes}", f"topic deny {as_a_job}")
    return "\n" + "".join(f"{line}\n" for line in lines)
