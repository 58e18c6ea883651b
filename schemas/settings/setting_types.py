"""Types of settings whose text must have a certain form.

A wrong value is reported when the settings are read, and the message names the accepted form.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

_MEBIBYTE: Final = 2**20
_SIZE: Final = re.compile(r"([1-9][0-9]{0,9})([kmgtKMGT])", re.ASCII).fullmatch
_BYTES: Final = {"k": 2**10, "m": _MEBIBYTE, "g": 2**30, "t": 2**40}
# Spark refuses to start with less than 450 MiB of heap.
_SPARK_LEAST_MIB: Final = 512
_LOCAL_MASTER: Final = re.compile(r"local(\[([1-9][0-9]*|\*)(, *[1-9][0-9]*)?\])?", re.ASCII).fullmatch
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?", re.ASCII).fullmatch
_ANY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared, not listened at
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


def _data_directory(value: object) -> object:
    if value == "":
        raise ValueError("is empty: name a directory, or unset it (TRUNKLINE__DATA_DIR) for the default, var/")
    return value


def _heap(value: str) -> str:
    found = _SIZE(value)
    if found is None:
        raise ValueError(f"{value!r} is no size: expected a whole number and a unit, such as 700m or 2g")
    if int(found[1]) * _BYTES[found[2].lower()] < _SPARK_LEAST_MIB * _MEBIBYTE:
        raise ValueError(f"{value!r} is too little: Spark needs {_SPARK_LEAST_MIB}m or more")
    return value


def _master(value: str) -> str:
    if _LOCAL_MASTER(value):
        return value
    if value.startswith("spark://"):
        _check_addresses(
            value.removeprefix("spark://"), value, "spark://HOST:PORT, or several HOST:PORT by commas"
        )
        return value
    raise ValueError(f"{value!r} is no master: expected local, local[N], local[*] or spark://HOST:PORT")


def _servers(value: str) -> str:
    _check_addresses(value, value, "HOST:PORT, or several by commas")
    return value


def _check_addresses(text: str, value: str, form: str) -> None:
    for one in text.split(","):
        host, _, port = one.strip().rpartition(":")
        if not _is_host(host.removeprefix("[").removesuffix("]")) or not _is_port(port):
            raise ValueError(f"{value!r} has no address in {one.strip()!r}: expected {form}")


def _host(value: str) -> str:
    if not _is_host(value):
        raise ValueError(f"{value!r} is no host: expected a name or an IP address, without scheme and port")
    return value


def _is_host(text: str) -> bool:
    if _HOST(text):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 65535


def _http_address(address: str) -> str:
    parts = urlsplit(address)
    # `parts.port` raises ValueError for a port that is not a number.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT")
    return address


def networks_of(value: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """Return the networks of a text such as `10.0.0.0/8, ::1`. Raises ValueError for one that is none."""
    return tuple(ipaddress.ip_network(one.strip()) for one in value.split(",") if one.strip())


def _networks(value: str) -> str:
    try:
        networks_of(value)
    except ValueError as error:
        raise ValueError(f"expected networks by commas, such as 10.0.0.0/8, ::1: {error}") from None
    return value


def host_names_of(value: str) -> tuple[str, ...]:
    """Return the names of a text such as `trunk.example, 10.0.0.7`. Raises ValueError for any other."""
    return tuple(_host(one.strip()) for one in value.split(",") if one.strip())


def _host_names(value: str) -> str:
    host_names_of(value)
    return value


Place = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
"""A path or a URI."""
DataDirectory = Annotated[Path, BeforeValidator(_data_directory)]
Heap = Annotated[str, AfterValidator(_heap)]
"""A JVM's heap size for Spark."""
SparkMaster = Annotated[str, AfterValidator(_master)]
Servers = Annotated[str, AfterValidator(_servers)]
"""Addresses of Kafka brokers."""
Host = Annotated[str, AfterValidator(_host)]
HttpAddress = Annotated[str, AfterValidator(_http_address)]
"""A URL with scheme and host."""
HostNameList = Annotated[str, AfterValidator(_host_names)]
"""Host names or IP addresses, by commas."""
Networks = Annotated[str, AfterValidator(_networks)]
"""IP networks or addresses, by commas."""

Listener = tuple[str, str, int]
"""A setting's name, and the host and port on which a server of this machine listens."""


def listener_at(setting: str, servers: str) -> Iterator[Listener]:
    """Yield `(setting, host, port)` for each server that runs on this machine, for `check_ports_differ`.

    Nothing is yielded for a host other than loopback.

    Args:
        setting: the name of the setting that has the addresses.
        servers: the addresses, as `HOST:PORT` by commas.
    """
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        if host in _LOOPBACK:
            yield setting, host, int(port)


def check_ports_differ(listeners: Iterable[Listener]) -> None:
    """Check that no two servers of this machine are set to listen on the same port of the same address.

    `listeners` has one triple for each server: the name of its setting, its host and its port. Port 0 means
    that there is no such server.

    Raises:
        ValueError: two have the same port and their addresses overlap. The message names both settings.
    """
    for (one, host, port), (other, other_host, other_port) in combinations(listeners, 2):
        hosts = {host, other_host}
        if port and port == other_port and (len(hosts) == 1 or hosts & _ANY_ADDRESS or hosts <= _LOOPBACK):
            raise ValueError(f"{one} and {other} have the same port {port}: give each a port of its own")


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address (127.0.0.0/8, ::1 or `localhost`).

    Only programs on this machine can reach a server that listens on such an address. Other names are not looked
    up: the result is False for them, and also for 0.0.0.0 and ::.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_at(scheme: str, host: str, port: int) -> str:
    """Return the URL `scheme://host:port`. An IPv6 address is put into brackets."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
