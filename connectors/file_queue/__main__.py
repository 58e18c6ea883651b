"""The file queue as a program: `python -m connectors.file_queue`."""

import sys

from connectors.file_queue.command_line import main

sys.exit(main())
