"""A check whether an MQTT broker accepts a user: it sends one CONNECT, and starts no thread.

It is quick enough to be made after every change of the accounts of the local stack's own broker.
"""

from __future__ import annotations

import select
import time
from enum import Enum
from typing import Final

from paho.mqtt.reasoncodes import ReasonCode

from trunkline_agent.broker import BrokerAccess, as_broker, broker_name, clear_password
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_client import BAD_LOGIN, connect_properties, cut_connection, dial, new_client

_WAIT_TICK_S: Final = 0.05


class LoginAnswer(Enum):
    """The broker's answer to a login: `LET_IN`, `REFUSED` (wrong user or password), or `SILENT`.

    `SILENT` means no clear answer: no broker runs, it is not trusted, it does not answer in time, or it has no
    room for another connection.
    """

    LET_IN = "let in"
    REFUSED = "refused"
    SILENT = "silent"


def try_login(
    mqtt: BrokerAccess, username: str | None = None, password: str | None = None, timeout_s: float = 1.0
) -> LoginAnswer:
    """Log in at the broker once, disconnect, and return the broker's answer to the login.

    Args:
        mqtt: the broker and its TLS files.
        username: the user to log in as; None: without a login.
        password: the user's password; None: without a password.
        timeout_s: how many seconds to wait for the answer.

    Raises:
        UsageError: certificates cannot be read. It raises nothing else.
    """
    user = as_broker(mqtt, username=username, password=password, connect_timeout_s=timeout_s)
    client, answers, deadline = new_client(user), list[ReasonCode](), time.monotonic() + timeout_s
    client.on_connect = lambda _client, _data, _flags, reason, _properties: answers.append(reason)
    try:
        dial(client, user, connect_properties(), start_thread=False)
        poll = select.poll()  # unlike paho's select(), it handles any file descriptor
        while not answers and (connected := client.socket()) is not None and time.monotonic() < deadline:
            poll.register(connected, select.POLLIN)
            poll.poll(1000 * _WAIT_TICK_S)
            client.loop_read()
        client.disconnect()
    except (BackboneUnreachable, OSError):
        return LoginAnswer.SILENT
    finally:
        cut_connection(client)
    if answers and not answers[0].is_failure:
        return LoginAnswer.LET_IN
    return LoginAnswer.REFUSED if answers and answers[0].value in BAD_LOGIN else LoginAnswer.SILENT


def wait_for_login(mqtt: BrokerAccess, timeout_s: float) -> None:
    """Wait until the broker accepts the user name and password in `mqtt`. Tries again every 50 ms.

    A publisher calls it for a job that was just registered, whose account the gateway may still be making.
    Raises BackboneUnreachable after about `timeout_s` seconds, and UsageError for certificates that cannot
    be read.
    """
    password = clear_password(mqtt)
    deadline = time.monotonic() + timeout_s
    while (answer := try_login(mqtt, mqtt.username, password)) is not LoginAnswer.LET_IN:
        if time.monotonic() > deadline:
            why = "does not answer" if answer is LoginAnswer.SILENT else f"has no account {mqtt.username!r}"
            raise BackboneUnreachable(
                f"MQTT broker {broker_name(mqtt)} {why} after {timeout_s:g} s. The gateway makes a job's "
                "account: './trunkline doctor' shows whether the gateway runs"
            )
        time.sleep(_WAIT_TICK_S)
