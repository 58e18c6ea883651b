"""The MQTT client's connection where the process has more open than the client can wait for."""

from __future__ import annotations

import os
import resource
from contextlib import ExitStack
from pathlib import Path

import pytest

from schemas.settings.settings import Settings
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_client import connect_properties, cut_connection, dial, new_client

LIMIT = 1024


@pytest.mark.parametrize("free", [0, 1, 2])
def test_with_too_many_files_open_the_reason_is_told_at_once(backbone_settings: Settings, free: int) -> None:
    mqtt = backbone_settings.mqtt
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        if soft < 2 * LIMIT:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * LIMIT), hard))
            opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        held = [os.open(os.devnull, os.O_RDONLY)]
        while held[-1] < LIMIT:
            held.append(os.open(os.devnull, os.O_RDONLY))
        # The connection's own may still be low, and not that of the socket by which its thread is woken.
        for _ in range(free):
            os.close(held.pop(0))
        opened.callback(lambda: [os.close(number) for number in held])
        client = new_client(mqtt)
        with pytest.raises(BackboneUnreachable, match=r"too many files .* above 1023"):
            dial(client, mqtt, connect_properties())
    dial(client, mqtt, connect_properties())
    cut_connection(client)


def test_where_no_file_can_be_opened_any_more_that_is_told_as_well(backbone_settings: Settings) -> None:
    mqtt = backbone_settings.mqtt
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = new_client(mqtt)
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        held: list[int] = []
        opened.callback(lambda: [os.close(number) for number in held])
        highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, hard))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        # One more can be opened: the connection.
        os.close(held.pop())
        with pytest.raises(BackboneUnreachable, match="Too many open files"):
            dial(client, mqtt, connect_properties())
    dial(client, mqtt, connect_properties())
    cut_connection(client)
