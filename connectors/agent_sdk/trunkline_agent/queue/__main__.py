"""The file queue as a program: `python -m trunkline_agent.queue`."""

import sys

from trunkline_agent.queue.command_line import main

sys.exit(main())
