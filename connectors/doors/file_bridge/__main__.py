"""The file bridge, `python -m connectors.doors.file_bridge`, between file queue and mailboxes (FQ-15 to FQ-17).

A queue has one bridge at a time. A second bridge waits until the first one has ended.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from pathlib import Path
from typing import IO, Final

import structlog

from connectors.doors.file_bridge.bridge import Consumers, FileBridge
from connectors.doors.file_bridge.mailbox_follower import MailboxFollower
from connectors.doors.file_bridge.posting_rules import VERDICT_WAIT_S, BridgeRules, GatewayBlobs
from connectors.doors.file_bridge.queue_folder import queue_root
from connectors.doors.file_bridge.records import DOOR
from connectors.plumbing.gateway_client.verdict_stream import VerdictStream
from connectors.plumbing.machine.background_service import run_program
from schemas.settings.settings import Settings

log = structlog.stdlib.get_logger("connectors.doors.file_bridge")  # __name__ is __main__ when it runs

LOCK: Final = ".bridge.lock"
_TICK_S: Final = 0.2
_STOP_S: Final = 5.0


def wait_alone(settings: Settings, stop: threading.Event) -> IO[bytes] | None:
    """Wait until no other bridge serves this queue, and take the lock that keeps others out.

    It waits without a time limit, until `stop` is set.

    Returns:
        The open lock file, whose closing releases the lock; None if `stop` was set before the lock was free.

    Raises:
        OSError: The lock file in the queue's folder cannot be opened.
    """
    root = queue_root(settings)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Never follow a link, and do not block on a pipe in place of the file.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.fdopen(os.open(root / LOCK, flags, 0o600), "r+b", buffering=0)
    is_logged = False
    while not stop.is_set():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_logged:
                log.info("standby", root=str(root))
                is_logged = True
            stop.wait(_TICK_S)
        else:
            return lock
    lock.close()
    return None


def run(settings: Settings, stop: threading.Event, ready_file: Path | None) -> None:
    """Wait until no other bridge serves the queue, then pass messages in both directions until `stop` is set.

    While Kafka, the gateway or a file is unavailable, the bridge logs that and tries again.

    Args:
        settings: The settings of the queue, the log and the gateway.
        stop: Ends the bridge when it is set. The bridge sets it itself when it fails.
        ready_file: A file to create or touch whenever no message waits in the files; None for no such file.

    Raises:
        TrunklineError: The topic does not match the settings.
        OSError: The lock file in the queue's folder cannot be opened.
    """
    lock = wait_alone(settings, stop)
    if lock is None:
        return
    consumers = Consumers()
    verdicts = VerdictStream(settings, VERDICT_WAIT_S, DOOR)
    rules = BridgeRules(verdicts)
    blobs = GatewayBlobs(settings, lambda: verdicts.up)
    ready = (lambda: None) if ready_file is None else ready_file.touch
    follower = MailboxFollower(settings, stop, consumers, rules)
    with lock:
        verdicts.start()
        follower.start()
        try:
            FileBridge(settings, stop, consumers, rules, blobs, follower.agents, ready).run()
        finally:
            stop.set()
            verdicts.close()
            follower.join(_STOP_S)
    log.info("stopped")


if __name__ == "__main__":
    sys.exit(run_program("file_bridge", run))
