"""Runs the command line: `python -m connectors.cli`."""

import sys

from connectors.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
