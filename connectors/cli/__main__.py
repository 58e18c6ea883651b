"""Runs the command line: `python -m connectors.cli`."""

import sys

from connectors.cli.main import main
from trunkline_agent.private_files import keep_files_private

if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
