"""The stdio wrapper as a program: `python -m trunkline_agent.mcp`. It is configured by its environment."""

import signal
import sys

# An interrupt during the imports, which take a second, ends the process at once.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from trunkline_agent.mcp.stdio_wrapper import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
