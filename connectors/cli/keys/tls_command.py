"""Makes certificates for Mosquitto, Kafka and the gateway, signed by an authority of this installation.

  trunkline tls create
  trunkline tls create --host broker.example --host 192.0.2.7 --mutual
  trunkline tls create --renew

Valid files stay as they are, so running it again is harmless: it makes missing files, files that expire within
30 days, and files that do not name a --host. Every key is made with mode 0600; a key that others can read is
reported, and its mode stays. TLS is used once the settings say so; the command prints them at the end. Parts
that run use new files after a restart. An authority that is not complete, because ca.key is elsewhere or
damaged, is replaced with --renew-ca only. While others can read ca.key, nothing is signed with it.

Exit codes: 0; 1 the folder cannot be written; 2 wrong arguments; 4 the authority's key or certificate is
missing, they do not match, or others can read the key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.actions import Actions, argument, flag
from connectors.cli.shared.call import Call

if TYPE_CHECKING:
    from connectors.plumbing.tls_keys.tls_files import TlsFolder
    from schemas.settings.settings import Settings

ACTIONS: Final = Actions()


@ACTIONS.add(
    argument("--dir", "the folder (default: the setting tls_dir)", type=Path, metavar="DIR"),
    argument(
        "--host",
        "a name or address of the servers beside 127.0.0.1 and localhost; may be repeated",
        action="append",
        default=[],
    ),
    flag("--mutual", "certificates for the MQTT clients as well"),
    flag("--renew", "make all files anew, except the authority"),
    flag("--renew-ca", "also a new authority: every client needs its ca.crt"),
    example="trunkline tls create --host broker.example --mutual",
)
def _create(call: Call) -> int:
    """Make missing and expiring files, and print the settings that use them."""
    # Imported here, because cryptography is slow to import and help must be quick.
    from connectors.plumbing.tls_keys.tls_files import create

    folder = (call.dir or call.settings.tls_path).absolute()
    made = create(folder, call.host, mutual=call.mutual, renew=call.renew, renew_authority=call.renew_ca)
    wanted = _settings_for(made, call.settings)
    if call.json:
        print(json.dumps(_as_json(made, wanted)))
    else:
        _print(made, wanted)
    return 0


def _settings_for(made: TlsFolder, settings: Settings) -> dict[str, Any]:
    """Return the settings that use all files, as conf/trunkline.yaml has them."""
    from connectors.plumbing.tls_keys.tls_files import KAFKA_PASSWORD, client_name

    ca, gateway = str(made.of("ca").certificate), made.of("gateway")
    mqtt: dict[str, Any] = {"tls": True, "ca_certs": ca}
    if (operator := next((f for f in made.files if f.name == client_name("operator")), None)) is not None:
        mqtt |= {
            "require_client_cert": True,
            "certfile": str(operator.certificate),
            "keyfile": str(operator.key),
        }
    kafka = {
        "security_protocol": "SASL_SSL",
        "sasl_username": settings.kafka.sasl_username,
        "sasl_password_file": str(made.folder / KAFKA_PASSWORD),
        "ssl_ca_certs": ca,
    }
    found: dict[str, Any] = {} if made.folder == settings.tls_path else {"tls_dir": str(made.folder)}
    return found | {
        "mqtt": mqtt,
        "kafka": kafka,
        "gateway": {"certfile": str(gateway.certificate), "keyfile": str(gateway.key), "ca_certs": ca},
    }


def _as_json(made: TlsFolder, wanted: dict[str, Any]) -> dict[str, Any]:
    return {
        "folder": str(made.folder),
        "files": [
            {
                "name": file.name,
                "certificate": str(file.certificate),
                "key": str(file.key),
                "valid_until": file.valid_until,
                "hosts": file.hosts,
                "made": file.why is not None,
                "why": file.why,
            }
            for file in made.files
        ],
        "exposed": [str(file) for file in made.exposed],
        "settings": wanted,
    }


def _print(made: TlsFolder, wanted: dict[str, Any]) -> None:
    print(f"In {made.folder}:")
    for file in made.files:
        what = "kept" if file.why is None else f"made: {file.why}"
        hosts = f"  for {', '.join(file.hosts)}" if file.hosts else ""
        print(f"  {file.name:<18} until {file.valid_until}  {what}{hosts}")
    for path in made.exposed:
        print(
            f"\nOthers can read {path} (mode {path.stat().st_mode & 0o777:o}): chmod 600 {path}; and if "
            "somebody may have read it, make it anew (--renew; remove kafka.password for another)"
        )
    print("\nTo use them, put this into conf/trunkline.yaml (any section by itself will do); then down, up:\n")
    for name, value in wanted.items():
        if not isinstance(value, dict):
            print(f"{name}: {json.dumps(value)}")
            continue
        print(f"{name}:")
        for setting, chosen in value.items():
            print(f"  {setting}: {json.dumps(chosen)}")
    print(f"\nClients elsewhere need {made.of('ca').certificate}; ca.key and all other keys stay here.")
