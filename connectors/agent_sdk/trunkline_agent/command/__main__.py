"""`python -m trunkline_agent.command` is the command `trunkline-agent`."""

import sys

from trunkline_agent.command.main import main

if __name__ == "__main__":
    sys.exit(main())
