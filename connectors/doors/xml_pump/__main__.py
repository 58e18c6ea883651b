"""Run a pump: `python -m connectors.doors.xml_pump`."""

import sys

from connectors.doors.xml_pump.pump_program import main
from schemas.keys.umask import keep_files_private

if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
