"""An agent over MQTT that kills itself in its callback for the second message. Its settings come on stdin."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from trunkline_agent.credentials import Credentials, MqttAccess
from trunkline_agent.mqtt.inbox_receiver import InboxMessage
from trunkline_agent.mqtt.mqtt_agent import MqttAgent


def main() -> None:
    """Receive until killed."""
    given = json.load(sys.stdin)
    access = MqttAccess(given["host"], given["port"], False, given["prefix"], given["secret"])
    got: list[str] = []

    def receive(message: InboxMessage) -> None:
        got.append(message.message_id)
        if len(got) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with MqttAgent(Credentials(given["name"], mqtt=access), given["state"], receive):
        threading.Event().wait(30)


if __name__ == "__main__":
    main()
