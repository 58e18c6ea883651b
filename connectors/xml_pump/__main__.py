"""Runs a pump: `python -m connectors.xml_pump`."""

import sys

from connectors.xml_pump.pump_program import main

if __name__ == "__main__":
    sys.exit(main())
