"""Lists, rotates and ends keys: the master keys, the keys of agents, and the secrets of jobs.

  trunkline keys list
  trunkline keys rotate master                          while the stack is down
  trunkline keys rotate agent builder builder.pem       the same as 'trunkline agents rotate'
  trunkline keys rotate job 0a1b2c3d --overlap 10m      a new secret for a job, which is printed once
  trunkline keys end k0a1b2c3d                          records under this master key count no more
  trunkline keys mac file /etc/trunkline/file.key       the key of a bridge on a machine without the master keys

A master key seals secrets and proves who appended a record. After a rotation the new master key does both, and
the older ones stay to open: nothing is sealed anew, and a refold of the ledger gives the same rows. Every
program reads the keys at its start, and cannot open what a key seals that it has not read. So the stack must be
down. If programs run on other machines, rotate in two steps:

  trunkline keys rotate master --add-only               then copy the file to all, and restart them all
  trunkline keys rotate master --activate k0a1b2c3d     then restart them again at any time

If somebody knows the old key, end it as soon as all programs were restarted with the new one. A bridge with a
key file of its own needs a new file first ('keys mac'). Records under an ended key are lost.

Exit codes: 0; 2 wrong arguments; 3 no such key, agent or job; 4 refused, as while the stack runs, or for a job
that has ended, or for a key in use; 5 the gateway or Kafka does not answer.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from connectors.cli.shared.actions import Action, Actions, argument, flag, one_of
from connectors.cli.shared.arguments import JOB, OVERLAP, ROTATION, path, request_id
from connectors.cli.shared.call import Call
from trunkline_agent.errors import NotFound, Refused, UsageError
from trunkline_agent.terminal_text import escaped

ACTIONS: Final = Actions()
_KINDS: Final = Actions()


@ACTIONS.add()
def _list(call: Call) -> int:
    """List the master keys by id, the oldest first: which one seals, and which have ended."""
    from connectors.cli.keys.key_use_reader import ended_keys
    from connectors.plumbing.tls_keys.master_keys import master_keys

    found, ended = master_keys(call.settings), ended_keys(call.settings)
    if call.json:
        shown = [{"key_id": key.key_id, "active": key.is_active, "ended": key.key_id in ended} for key in found]
        print(json.dumps({"master": shown}))
        return 0
    for key in found:
        what = "seals and opens" if key.is_active else "opens"
        print(f"master  {key.key_id}  {what}{', ended for new records' if key.key_id in ended else ''}")
    print("Keys of an agent: trunkline agents status NAME")
    return 0


@ACTIONS.add(
    argument("key_id", "the id of the master key", metavar="ID"),
    flag("--force", "end it although programs may still append under it; their records are then rejected"),
    example="trunkline keys end k0a1b2c3d",
)
def _end(call: Call) -> int:
    """End a master key for new records: from now on, the log takes none that were made with it."""
    from connectors.log.publisher import Publisher
    from connectors.plumbing.tls_keys.master_keys import master_keys
    from schemas.log_access.event_topic import check_topic
    from schemas.streams.control.record_macs import mac_key_ended_records, macs_required_records
    from schemas.tables.fold_version import check_fold_version

    known, kafka = {key.key_id: key for key in master_keys(call.settings)}, call.settings.kafka
    if call.key_id not in known:
        raise NotFound(f"there is no master key {call.key_id!r}; 'trunkline keys list' shows all keys")
    if known[call.key_id].is_active:
        raise Refused(
            f"{call.key_id} is the active key: first 'trunkline keys rotate master', and restart all programs"
        )
    (active,) = [key.key_id for key in known.values() if key.is_active]
    check_topic(call.settings)
    check_fold_version(call.settings)
    _refuse_ended(call, active)
    if not call.force:
        _check_not_in_use(call, active)
    # A partition in which no MAC is required has no keys that could end. The former records are duplicates
    # in any other partition.
    required = list(macs_required_records(kafka.partitions))
    with Publisher(call.settings) as publisher:
        for append in [publisher.append(record) for record in required]:
            append.result(kafka.delivery_timeout_s)
        appends = [publisher.append(record) for record in mac_key_ended_records(kafka.partitions, call.key_id)]
        ends = {
            str(at.partition): at.offset for at in (one.result(kafka.delivery_timeout_s) for one in appends)
        }
    if call.json:
        print(json.dumps({"key_id": call.key_id, "ended_at": ends}))
    else:
        print(f"master key {call.key_id} ends: later records that were made with it are rejected")
    return 0


def _refuse_ended(call: Call, key_id: str) -> None:
    """Raise Refused if a master key that is active, or is to be, has ended."""
    from connectors.cli.keys.key_use_reader import ended_keys

    if key_id in ended_keys(call.settings):
        raise Refused(
            f"master key {key_id} has ended: records that are made with it are rejected. Make another one "
            "active: 'trunkline keys rotate master'"
        )


def _check_not_in_use(call: Call, active: str) -> None:
    """Raise Refused if programs may still append records under the master key of the call."""
    from connectors.cli.keys.key_use_reader import parts_with_older_keys, signers_still_under

    force = "With --force the key ends now, and records that are still made with it are lost"
    if parts := parts_with_older_keys(call.settings):
        raise Refused(
            f"{', '.join(parts)} started before {call.settings.key_file} changed, and may use the older key: "
            f"restart the stack ('trunkline down', 'trunkline up'), then do this again. {force}"
        )
    if signers := signers_still_under(call.settings, call.key_id, active):
        shown = ", ".join(f"{name} (at {at:%H:%M:%S} UTC)" for name, at in sorted(signers.items()))
        raise Refused(
            f"programs may still append under {call.key_id}. In the ledger, these did last: {shown}. Restart "
            f"each with {active}; a bridge with a key file of its own needs a new one ('trunkline keys mac'). "
            f"Then do this again. A program that has appended nothing since is still named. {force}"
        )


@ACTIONS.add(
    argument("signer", "the bridge: mqtt or file", choices=("mqtt", "file")),
    argument("file", "write the key to this file, for the setting mac_key_file", metavar="FILE", type=Path),
    example="trunkline keys mac file /etc/trunkline/file.key",
)
def _mac(call: Call) -> int:
    """Write the key of a bridge that runs without the master keys. It is for that bridge's records alone."""
    from schemas.keys.record_macs import write_mac_key
    from schemas.keys.sealing import load_keyring

    file: Path = call.file
    if not file.parent.is_dir():
        raise UsageError(f"FILE: there is no folder {file.parent}")
    key = write_mac_key(load_keyring(call.settings), call.signer, file)
    if call.json:
        print(json.dumps({"signer": key.signer, "master": key.master, "file": str(file)}))
    else:
        print(f"key of the {key.signer} bridge, from master key {key.master}: {file}")
    return 0


@_KINDS.add(
    one_of(
        flag("--add-only", "add a key that only opens: the first step"),
        argument("--activate", "let this key seal: the second step", metavar="ID"),
    ),
    example="trunkline keys rotate master",
)
def _master(call: Call) -> int:
    """Make a new master key, which seals from now on."""
    from connectors.plumbing.tls_keys.master_keys import activate, add_key, rotate
    from connectors.programs.local_stack import control

    if call.add_only:
        key_id = add_key(call.settings)
        state = "opens; restart every program with this file, then --activate it"
    elif call.activate is not None:
        _refuse_ended(call, call.activate)
        activate(call.settings, call.activate)
        key_id, state = call.activate, "seals, in each program from its next start on"
    else:
        if control.running_state(call.settings) is not None:
            raise Refused(
                "the stack runs, and would go on with the keys that it has: first 'trunkline down', then this, "
                "then 'trunkline up'. Without a pause: --add-only, restart, --activate"
            )
        key_id = rotate(call.settings)
        state = "seals from now on; the older ones stay to open. Back the file up"
    if call.json:
        print(json.dumps({"key_id": key_id, "active": not call.add_only, "file": str(call.settings.key_file)}))
    else:
        print(f"master key {key_id} {state}: {call.settings.key_file}")
    return 0


@_KINDS.add(*ROTATION, example="trunkline keys rotate agent builder builder.pem --overlap 2h")
def _agent(call: Call) -> int:
    """Make a new key for an agent that takes part; the old one stays valid for a while."""
    from connectors.cli.agents.agents_command import rotate

    return rotate(call)


@_KINDS.add(
    JOB,
    path("--secret-file", "write the secret there, in one step, and do not print it"),
    request_id("the same rotation"),
    OVERLAP,
    example="trunkline keys rotate job 0a1b2c3d --overlap 10m",
)
def _job(call: Call) -> int:
    """Make a new secret for a job that has not ended; the old one stays valid for a while."""
    file: Path | None = call.secret_file
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--secret-file: there is no folder {file.parent}")
    effect, overlap_s = "the job has its new secret", round(call.overlap)
    answer = call.post_named("jobs", call.job_id, "secret", possible_effect=effect, overlap_s=overlap_s)
    shown = _store_secret(call, answer)
    rest = {name: value for name, value in answer.items() if name not in ("secret", "request_id")}
    lines = [
        f"job     {call.job_id}",
        f"secret  {shown.get('secret') or 'in ' + shown['secret_file']}",
        f"user    {escaped(answer['mqtt_user'])} at the backbone's own MQTT broker",
        f"older   good until {escaped(answer['old_secret_ends_at'])}",
    ]
    if "secret" in shown:
        lines.append(f"The secret is not shown again; it is kept in {shown['secret_file']}.")
    lines.append(
        "Give it to the agent in time: as TRUNKLINE_JOB_SECRET, or let its session pick the job again."
    )
    return call.print_answer({**rest, **shown, "request_id": answer["request_id"]}, *lines)


def _store_secret(call: Call, answer: dict[str, Any]) -> dict[str, str]:
    """Write the secret to its file, and where this machine keeps the old one. Return the parts to show."""
    from connectors.tools.job_tools.job_files import find_secret, replace_private, store_rotated

    secret, file = answer["secret"], call.secret_file
    shown = {"secret_file": str(file)}
    if file is not None:
        replace_private(file, secret + "\n", "the job's secret")
    if file is None or find_secret(call.settings, call.job_id) is not None:
        ends_at = datetime.fromisoformat(answer["old_secret_ends_at"]).timestamp()
        kept = store_rotated(call.settings, call.job_id, secret, ends_at)
        if file is None:
            shown = {"secret": secret, "secret_file": str(kept)}
    return shown


ACTIONS.append(
    Action("rotate", "replace a key by a new one; the old one still opens what it sealed", kinds=_KINDS)
)
