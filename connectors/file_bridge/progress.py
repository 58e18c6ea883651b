"""What the bridge keeps on disk beside its cursors: for whom it has carried what was sent to everybody, and how
far it has read the audit. Without the file it carries all of that again, and it settles as duplicates.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from connectors.file_bridge.poll_audit import AuditPlace
from connectors.file_queue.session_files import replace_file


@dataclass
class Progress:
    """`served`: by session, the consumers whose broadcasts up to the bridge's cursor are carried."""

    served: dict[str, set[str]] = field(default_factory=dict)
    audit: AuditPlace = field(default_factory=AuditPlace)

    @classmethod
    def load(cls, path: Path) -> Progress:
        """What is on disk; nothing for a file that is not there, or is not ours."""
        try:
            found = json.loads(path.read_bytes())
            served = {str(session): {str(name) for name in names} for session, names in found["served"].items()}
            inode, offset = found["audit"]
            return cls(served, AuditPlace(int(inode), max(0, int(offset))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()

    def save(self, path: Path) -> None:
        """Put it on the disk; the old or the new is there at any moment."""
        path.parent.mkdir(parents=True, exist_ok=True)
        served = {session: sorted(names) for session, names in self.served.items()}
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            replace_file(folder, path.name, json.dumps({"served": served, "audit": self.audit}).encode())
        finally:
            os.close(folder)
