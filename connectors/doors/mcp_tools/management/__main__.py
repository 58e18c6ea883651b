"""The management MCP server on stdin and stdout: `python -m connectors.doors.mcp_tools.management`."""

import signal
import sys

# An interrupt during the imports, which take a second, ends the process at once.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from connectors.doors.mcp_tools.management.management_server import main  # noqa: E402
from trunkline_agent.private_files import keep_files_private  # noqa: E402

if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
