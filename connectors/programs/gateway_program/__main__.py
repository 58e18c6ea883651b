"""Start the gateway: `python -m connectors.programs.gateway_program`."""

import sys

from connectors.programs.gateway_program.program import main
from trunkline_agent.private_files import keep_files_private

if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
