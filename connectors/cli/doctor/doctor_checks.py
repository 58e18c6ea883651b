"""The checks of `trunkline doctor`, in their order: each looks at one thing and says how to mend it."""

from __future__ import annotations

from collections.abc import Callable

from connectors.cli.doctor.doctor_audit import check_anchors, check_anchors_place
from connectors.cli.doctor.doctor_findings import FAIL, Finding
from connectors.cli.doctor.doctor_kafka import check_kafka, check_login, check_replicas
from connectors.cli.doctor.doctor_machine import (
    check_data_dir,
    check_disk,
    check_jars,
    check_java,
    check_key_file,
    check_mosquitto,
    check_plain_listeners,
    check_ports,
    check_python,
    check_settings,
)
from connectors.cli.doctor.doctor_organism import check_commands, check_organism
from connectors.cli.doctor.doctor_parts import (
    check_accounts,
    check_bridge,
    check_files,
    check_gateway,
    check_mqtt,
    check_streams,
    check_token,
    check_views,
    check_xml_pump,
)
from connectors.cli.doctor.doctor_tables import check_tables
from schemas.errors import TrunklineError
from schemas.settings.settings import Settings, SettingsError

CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "python": check_python,
    "java": check_java,
    "jars": check_jars,
    "mosquitto": check_mosquitto,
    "disk": check_disk,
    "privacy": check_data_dir,
    "keys": check_key_file,
    "settings": check_settings,
    "ports": check_ports,
    "listeners": check_plain_listeners,
    "kafka": check_kafka,
    "login": check_login,
    "replicas": check_replicas,
    "mqtt": check_mqtt,
    "accounts": check_accounts,
    "bridge": check_bridge,
    "files": check_files,
    "gateway": check_gateway,
    "token": check_token,
    "xml_pump": check_xml_pump,
    "organism": check_organism,
    "commands": check_commands,
    "streams": check_streams,
    "views": check_views,
    "tables": check_tables,
    "anchors": check_anchors,
    "anchors place": check_anchors_place,
}


def run_checks(settings: Settings) -> list[Finding]:
    """All findings, in order. A check that cannot be made is a finding itself."""
    found = []
    for name, check in CHECKS.items():
        try:
            found.append(check(settings))
        except (TrunklineError, SettingsError, OSError) as error:
            found.append(Finding(name, FAIL, str(error), "the message says what to do"))
    return found
