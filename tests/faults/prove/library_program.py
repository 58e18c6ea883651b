"""A program that uses the library, and that a test kills and starts again: an agent, or a worker of jobs.

    python -P -m tests.faults.prove.library_program agent|job CONFIG

It knows nothing of points and faults. After a kill it goes on with what the library, the hub and its own files
have. It ends when the file `stop` is there and nothing is left to do.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from trunkline_agent import Agent, Broker, HubAccess, Job
from trunkline_agent.errors import LeaseLost, TrunklineError
from trunkline_agent.outbox.outbox import JobOutbox

EVENTS: Final = 5
ABOUT: Final = "about"
# When the lease of a killed predecessor has run out, its message comes within two seconds.
_AGAIN_S: Final = 3.0
# A gateway may be stopped for 30 s.
_PATIENCE_S: Final = 45.0
_LOCK_S: Final = 5.0
_PAUSE_S: Final = 0.1


def kind_of(seq: int) -> str:
    """Return the type of a job's event."""
    return "started" if seq == 1 else "completed" if seq == EVENTS else "progress"


def detail_of(job_id: str, seq: int) -> str:
    """Return the text of a job's event."""
    return f"{job_id} step {seq} through the library"


def serve(config: dict[str, Any]) -> None:
    """Answer each message of the mailbox, and send another agent a message about it."""
    lease_s = config["lease_s"]
    with Agent(None, config["credentials"], patience_s=_PATIENCE_S) as agent:
        while True:
            is_last = Path(config["stop"]).exists()
            message = agent.receive(lease_s=lease_s, wait_s=lease_s + _AGAIN_S if is_last else 1.0)
            if message is None:
                if is_last:
                    return
                continue
            try:
                with message:
                    message.reply(message.payload)
                    agent.send(config["about_to"], ABOUT, message.payload)
            except LeaseLost:
                # The hub was away for longer than the lease, so the message comes again.
                continue


def work(config: dict[str, Any]) -> None:
    """Work on the jobs in the folder, one after the other. Note each event that was acknowledged."""
    while True:
        is_last = Path(config["stop"]).exists()
        for path in sorted(Path(config["jobs"]).glob("*.json")):
            _work_on(json.loads(path.read_text()), config)
            path.rename(path.with_suffix(".done"))
        if is_last:
            return
        time.sleep(_PAUSE_S)


def _work_on(told: dict[str, str], config: dict[str, Any]) -> None:
    job_id, state = told["job_id"], Path(config["state"])
    if told["door"] == "mqtt":
        job = Job(job_id, told["secret"], mqtt=Broker(**config["broker"]), state_dir=state)
    else:
        hub = HubAccess(config["url"], config["token"])
        job = Job(job_id, told["secret"], hub=hub, state_dir=state, patience_s=_PATIENCE_S)
    with JobOutbox(state, job_id, _LOCK_S) as outbox:
        last, pending = outbox.last_seq, [one.seq for one in outbox.pending]
    job.resend()
    for seq in pending:
        _note(config, told, seq)
    for seq in range(last + 1, EVENTS + 1):
        job.publish(kind_of(seq), detail_of(job_id, seq))
        _note(config, told, seq)


def _note(config: dict[str, Any], told: dict[str, str], seq: int) -> None:
    with Path(config["acknowledged"]).open("a") as file:
        file.write(json.dumps([told["job_id"], told["door"], seq]) + "\n")


def main(kind: str, config: str) -> None:
    """Do the work of an `agent`, or of each `job`. Exit with the code of the library's error."""
    try:
        {"agent": serve, "job": work}[kind](json.loads(Path(config).read_text()))
    except TrunklineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
