"""The control of `bench freshness`: a plain Spark copy of the topic, in the place of the streaming jobs.

For spark-submit, with the settings and the ready file of the streaming jobs.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from connectors.programs.local_stack import Part
from connectors.programs.local_stack.part_plan import DELTA_CONF, STREAMS
from connectors.programs.local_stack.program_plans import READY_FILE
from connectors.programs.local_stack.stack import PLANS
from jobs import settle_events
from jobs.run_streams import prepare_session
from schemas.settings.settings import Settings, load_settings
from tests.benchmarks.drain import own_tables, start_copy


def copy_part(settings: Settings) -> Part:
    """Return the copy as a part of the stack with these settings, with tables of its own.

    It runs as the streaming jobs do, with the same options, and must not run beside them.
    """
    at = control_settings(settings)
    plan = PLANS[STREAMS](at)

    def command() -> list[str]:
        pairs = [word for name, value in DELTA_CONF.items() for word in ("--conf", f"{name}={value}")]
        submit, *options, _ = plan.command()
        return [submit, *options, *pairs, __file__]

    # It has nothing to do at its end.
    return Part(replace(plan, command=command, stop_within_s=1.0), at)


def control_settings(settings: Settings) -> Settings:
    """Return the settings of the copy."""
    return own_tables(settings, settings.data_path / "control")


def main() -> int:
    """Copy the topic until the process ends."""
    settings = load_settings()
    query = start_copy(prepare_session(settings), settings, available_now=False)
    while not settle_events.is_ready(query):
        time.sleep(0.2)
    Path(os.environ[READY_FILE]).touch()
    query.awaitTermination()
    return 1


if __name__ == "__main__":
    sys.exit(main())
