"""Registers, picks, cancels, shows and exports jobs, and submits work to an agent.

  trunkline jobs register --description "build the docs"
      prints the job's id and its secret, once: the job's events are signed with it. The secret is also kept
      on this machine for 'watch' and 'publish', in a 0600 file.
  trunkline jobs register --description "build the docs" --broker mq.example:1884
      the job's events go to an MQTT broker of its own; --broker-file for one with user, password, TLS
  trunkline jobs pick --session builder          the oldest job that waits for such a session
  trunkline jobs list --state running            newest last
  trunkline jobs cancel 0a1b2c3d --reason "no longer needed"
  trunkline jobs export 0a1b2c3d --to audit      meta.json, status.json, events.ndjson, from the ledger
  trunkline jobs submit "build the docs" --session builder --instructions task.md -- my-agent --quiet
      registers, starts the agent in a session of its own, watches, ends when the job has ended

Exit codes: 0; 2 wrong arguments; 3 no such job, nothing to pick; 4 refused, with the reason; 5 the gateway
does not answer; 130 after Ctrl-C. 'submit' ends as 'watch' does: 0 completed, 1 error or cancelled, 2 the
time ran out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from connectors.cli.shared.actions import Actions, argument, flag
from connectors.cli.shared.arguments import BROKER, JOB, duration, new_private_file, path, read_broker
from connectors.cli.shared.call import Call, Columns, Row
from connectors.cli.shared.declared import Shown, add_declared
from connectors.cli.shared.text_output import age_of, fields
from trunkline_agent.terminal_text import escaped

_SECRET_FILE: Final = path(
    "--secret-file",
    "write the secret there (new file, 0600), and the job's own broker, if it has one, into PATH.broker; "
    "do not print the secret nor keep it elsewhere",
)
ACTIONS: Final = Actions()


@ACTIONS.add(
    argument("--description", "what the job is to do", required=True, metavar="TEXT"),
    argument("--session", "only this agent session may pick it", metavar="NAME"),
    argument(
        "--notify",
        "the events that send a message to your mailbox; may be repeated (default: the end)",
        action="append",
        choices=("permission", "end", "nothing"),
    ),
    BROKER,
    _SECRET_FILE,
)
def _register(call: Call) -> int:
    """Register a job, print its id and secret once."""
    broker = read_broker(call)
    notify = None if call.notify is None else sorted({*call.notify} - {"nothing"})
    body = {"description": call.description, "session": call.session, "broker": broker, "notify": notify}
    with new_private_file(call.secret_file, "--secret-file") as file:
        job = call.post("jobs", **body)
        stored = _store_grant(call, job, broker, file)
    answer = {"job_id": job["job_id"], **stored, "position": job["position"]}
    return call.print_answer(answer, f"job     {job['job_id']}", *_grant_lines(broker, stored))


@ACTIONS.add(argument("--session", "the session that takes it", required=True, metavar="NAME"), _SECRET_FILE)
def _pick(call: Call) -> int:
    """Take the oldest pending job that a session may have."""
    from connectors.tools.job_tools.job_files import shown_fields

    with new_private_file(call.secret_file, "--secret-file") as file:
        job = call.post("jobs", "pick", session=call.session)
        broker = job["broker"]
        stored = _store_grant(call, job, broker, file)
    rest = {name: value for name, value in job.items() if name != "secret"}
    return call.print_answer(
        {**rest, "broker": None if broker is None else shown_fields(broker), **stored},
        f"job     {job['job_id']}",
        f"to do   {escaped(job['description'])}",
        *_grant_lines(broker, stored),
    )


_COLUMNS: Final[Columns] = {
    "JOB": "job_id",
    "STATE": "status",
    "AGE": lambda row: age_of(row["registered_at"]),
    "SESSION": lambda row: row["session"] or row["session_wanted"],
    "EVENTS": "events",
    "DESCRIPTION": lambda row: row["description"] or row["last_detail"],
}


@ACTIONS.add(JOB, argument("--to", "a folder that does not exist", type=Path, required=True, metavar="DIR"))
def _export(call: Call) -> int:
    """Write one job's history into a new folder, from the ledger."""
    from connectors.log.ledger_files.ledger_export import export_job

    done = export_job(call.settings, call.job_id, call.to)
    answer = {"job_id": call.job_id, "to": str(done.folder), "status": done.status, "events": done.events}
    text = f"{call.job_id}: {done.events} records, {escaped(str(done.status))}, in {done.folder}"
    return call.print_answer(answer, text)


@ACTIONS.add(
    argument("description", "what the job is to do"),
    argument("--session", "the new session that it runs in", required=True, metavar="NAME"),
    BROKER,
    argument(
        "--instructions",
        "the agent reads this on standard input, after lines on how to publish (- takes ours)",
        metavar="FILE",
    ),
    flag("--bare-instructions", "leave out the lines on how to publish"),
    path("--to", "where the audit files go (default: below data_dir)", "DIR"),
    duration("--timeout", "stop waiting after this long"),
    duration("--idle-timeout", "stop waiting when no event came for this long"),
    takes_command=True,
    usage="trunkline jobs submit [-h] [options] --session NAME DESCRIPTION -- COMMAND [ARGUMENT …]",
)
def _submit(call: Call) -> int:
    """Register a job and have an agent do it in a session."""
    from connectors.cli.jobs.jobs_submit import submit

    return submit(call)


def _store_grant(
    call: Call, job: dict[str, Any], broker: Mapping[str, Any] | None, file: IO[str] | None
) -> dict[str, str]:
    """Store a job's secret and broker. Return the parts that may be shown, and the names of the files."""
    from connectors.tools.job_tools.job_files import broker_file, secret_path, store_broker, store_secret

    job_id = job["job_id"]
    beside = call.secret_file or secret_path(call.settings, job_id)
    shown = {"broker_file": str(broker_file(beside))} if broker else {}
    if broker or file is None:
        # The broker first, so that a program that finds the secret also finds the job's broker.
        store_broker(beside, job_id, broker)
    if file is None:
        kept = store_secret(call.settings, job_id, job["secret"])
        return {"secret": job["secret"], "secret_file": str(kept), **shown}
    file.write(job["secret"] + "\n")
    return {"secret_file": str(call.secret_file), **shown}


def _grant_lines(broker: Mapping[str, Any] | None, stored: dict[str, str]) -> list[str]:
    lines = []
    if broker:
        lines.append(f"broker  {_broker_text(broker)}")
        lines.append(f"        It is kept, with its password if it has one, in {stored['broker_file']}.")
    if "secret" not in stored:
        return [*lines, f"secret  in {stored['secret_file']}"]
    return [
        *lines,
        f"secret  {stored['secret']}",
        f"The secret is not shown again; it is kept in {stored['secret_file']}.",
        "Give it to the agent as TRUNKLINE_JOB_SECRET.",
    ]


def _broker_text(broker: Mapping[str, Any]) -> str:
    """Return a job's broker on one line, without its password, sealed or not."""
    from connectors.tools.job_tools.job_files import shown_fields

    shown = {name: value for name, value in shown_fields(broker).items() if name != "sealed_password"}
    return ", ".join(f"{name} {escaped(str(value))}" for name, value in shown.items())


def _cancelled(found: Row) -> list[str]:
    again = " (it was before)" if found["verdict"] == "duplicate" else ""
    return [f"{found['job_id']} is {escaped(found['status'])}{again}"]


def _shown(row: Row) -> list[str]:
    shown = {name: value for name, value in row.items() if name != "broker"}
    broker = row.get("broker")
    return [fields({**shown, "broker": None if broker is None else _broker_text(broker)})]


def _oldest_first(found: Row) -> Row:
    jobs = sorted(found["jobs"], key=lambda row: (row["registered_at"], row["job_id"]))
    return {"jobs": jobs, "total": found["total"]}


add_declared(
    ACTIONS,
    "jobs",
    Shown("cancel", answer=_cancelled, arguments={"job_id": JOB}),
    Shown("show", answer=_shown, arguments={"job_id": JOB}),
    Shown("list", "List jobs, the newest last", adapted=_oldest_first, columns=_COLUMNS),
)
