"""Runs the gateway: `python -m connectors.gateway`."""

import sys

from connectors.gateway.program import main

if __name__ == "__main__":
    sys.exit(main())
