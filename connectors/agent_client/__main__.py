"""The stdio wrapper as a program: `python -m connectors.agent_client`. It is configured by its environment."""

import signal
import sys

# An interrupt during the imports, which take a second, ends the process at once.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from connectors.agent_client.stdio_wrapper import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
