"""An MQTT bridge that kills itself between the broker's answer and the claim, once it has published."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from connectors.doors.mqtt_bridge.__main__ import MqttBridge
from connectors.plumbing.machine.json_log import configure_json_log
from schemas.settings.settings import load_settings


def main() -> None:
    """Run until killed."""
    configure_json_log("mqtt_bridge", [])
    bridge = MqttBridge(load_settings(), threading.Event(), Path(os.environ["TRUNKLINE_READY_FILE"]))
    bridge._inboxes._step = lambda: os.kill(os.getpid(), signal.SIGKILL)
    bridge.run()


if __name__ == "__main__":
    main()
