"""The MQTT client's connection where the process has more open than the client can wait for."""

from __future__ import annotations

import os
import resource
from contextlib import ExitStack

import pytest

from connectors.mqtt_connection import connect_properties, cut_connection, dial, new_client
from schemas.errors import BackboneUnreachable
from schemas.settings import Settings

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
        for given_back in range(LIMIT // 2, LIMIT // 2 + free):
            held.remove(given_back)
            os.close(given_back)
        opened.callback(lambda: [os.close(number) for number in held])
        client = new_client(mqtt)
        with pytest.raises(BackboneUnreachable, match=r"too many files .* above 1023"):
            dial(client, mqtt, connect_properties())
    dial(client, mqtt, connect_properties())
    cut_connection(client)


def test_what_says_no_more_than_that_no_file_can_be_opened_is_told_as_well(backbone_settings: Settings) -> None:
    mqtt = backbone_settings.mqtt
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = new_client(mqtt)
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        number = os.open(os.devnull, os.O_RDONLY)
        opened.callback(os.close, number)
        # One more can be opened: the connection.
        resource.setrlimit(resource.RLIMIT_NOFILE, (number + 2, limits[1]))
        with pytest.raises(BackboneUnreachable, match=r"too many files .* Too many open files"):
            dial(client, mqtt, connect_properties())
    dial(client, mqtt, connect_properties())
    cut_connection(client)
