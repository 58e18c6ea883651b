"""Follows jobs to their end: each accepted event is one JSON line on standard output, all else on stderr.

  trunkline watch --job 0a1b2c3d | jq .detail
  trunkline watch --job 0a1b2c3d --job 4e5f6a7b --timeout 2h --idle-timeout 10m
  trunkline watch --all
  trunkline watch --job 0a1b2c3d --settled       over the gateway: sees cancellations, needs no secret

It reads MQTT and verifies with the secret that 'jobs register' or 'jobs pick' stored on this machine. A job
with an MQTT broker of its own is followed there; --all follows the brokers that this machine knows at the
start. With --settled it follows the gateway's stream of settled events instead; use that when the stack runs.

Exit codes: 0 all completed; 1 one ended in error or was cancelled; 2 the time ran out (also wrong arguments);
3 no such job, or its secret is not stored on this machine; 4 refused; 5 broker or gateway does not answer;
130 after Ctrl-C.
"""

from __future__ import annotations

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.arguments import duration, job_id
from connectors.cli.shared.call import Call
from trunkline_agent.errors import UsageError

ARGUMENTS = (
    argument("--job", "a job; may be repeated", type=job_id, action="append", metavar="ID"),
    flag("--all", "all jobs, also those that start later"),
    flag("--settled", "follow the gateway instead of MQTT"),
    duration("--timeout", "end after this long, e.g. 2h"),
    duration("--idle-timeout", "end when no event came for this long, e.g. 10m"),
    flag("--json", "the lines are always JSON; accepted for the sake of scripts"),
)


def run(call: Call) -> int:
    """Run `trunkline watch`: print events until the jobs' end or a time limit, and return the exit code.

    The exit code is 0 if all jobs have completed, 1 if all have ended but not all have completed, and 2 after a
    time limit. Raises TrunklineError if a job is unknown or its events cannot be followed.
    """
    # Imported here, because help must be quick.
    from connectors.cli.jobs.watch_sources import mqtt_source, settled_source, watch
    from connectors.tools.job_tools.job_watcher import Outcomes, Timers

    jobs = list(dict.fromkeys(call.job or ()))
    if bool(jobs) == call.all:
        raise UsageError("give --job ID, once or several times, or --all")
    timers = Timers(call.timeout, call.idle_timeout)
    outcomes = Outcomes(jobs, open_ended=call.all)
    source = settled_source if call.settled else mqtt_source
    with source(call.settings, jobs, outcomes) as next_sights:
        return watch(next_sights, outcomes, timers)
