"""The end of the MQTT session that an agent had under the client id of earlier versions.

That id was the user name, `agent.<name>`, which others can guess. The messages that the broker still has for it
are received like those of the present session.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from paho.mqtt.client import MQTTMessage

from trunkline_agent.broker import BrokerAccess
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.ack_window import AckWindow
from trunkline_agent.mqtt.mqtt_connection import MqttConnection

log = logging.getLogger(__name__)

_QUIET_S: Final = 2.0
_TICK_S: Final = 0.05


def read_former_session(
    mqtt: BrokerAccess,
    client_id: str,
    topic: str,
    take: Callable[[MqttConnection, AckWindow, MQTTMessage], None],
    closing: threading.Event,
) -> None:
    """Receive the messages of a former session, and let the broker remove it. Blocks; raises nothing.

    It ends when all its messages are acknowledged and no other one comes for 2 s, when the connection is lost,
    or when `closing` is set. In the last two cases the session stays.

    Args:
        mqtt: the broker and the login.
        client_id: the client id of the former session.
        topic: the topic that it is subscribed to. Messages on other topics are ignored: anybody may have had
            this session.
        take: takes each message with its connection and the window that acknowledges it.
        closing: ends the reading early.
    """
    last_s = time.monotonic()

    def on_message(message: MQTTMessage) -> None:
        nonlocal last_s
        last_s = time.monotonic()
        if message.topic == topic:
            take(connection, window, message)
        else:
            window.confirm(window.add(message.mid, message.qos))

    connection = MqttConnection(
        mqtt,
        client_id=client_id,
        session_expiry_s=mqtt.session_expiry_s,
        manual_ack=True,
        on_message=on_message,
    )
    window = AckWindow(connection.ack)
    try:
        connection.open()
    except BackboneUnreachable as error:
        log.warning("the session of an earlier version is not read: %s", error)
        return
    is_done = not connection.session_present
    if not is_done:
        connection.unsubscribe(topic)
    while not is_done and not connection.lost.is_set() and not closing.wait(_TICK_S):
        is_done = not len(window) and time.monotonic() - last_s > _QUIET_S
    connection.close(forget_session=is_done)
