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


def test_with_too_many_files_open_the_reason_is_told_at_once(backbone_settings: Settings) -> None:
    mqtt = backbone_settings.mqtt
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        if soft < 2 * LIMIT:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * LIMIT), hard))
            opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (number := os.open(os.devnull, os.O_RDONLY)) < LIMIT:
            opened.callback(os.close, number)
        opened.callback(os.close, number)
        client = new_client(mqtt)
        with pytest.raises(BackboneUnreachable, match=r"too many files .* above 1023"):
            dial(client, mqtt, connect_properties())
    dial(client, mqtt, connect_properties())
    cut_connection(client)
