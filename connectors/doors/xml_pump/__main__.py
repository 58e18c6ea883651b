"""Run a pump: `python -m connectors.doors.xml_pump`."""

import sys

from connectors.doors.xml_pump.pump_program import run
from connectors.plumbing.machine.background_service import run_program

if __name__ == "__main__":
    sys.exit(run_program("xml_pump", run))
