"""Addresses that a webhook may have: public ones, and those in networks of the settings (WH-03)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from contextlib import ExitStack, contextmanager

import pytest

from connectors.hub.webhooks.addresses import AddressRefusedError, AddressRule
from connectors.hub.webhooks.webhook_client import Target, WebhookClient
from schemas.settings.settings import WebhookSettings
from tests.connectors.hub.webhooks.receiver import receiving
from tests.connectors.hub.webhooks.webhook_hub import SECRET

pytestmark = pytest.mark.requirement("WH-03")

REFUSED = (
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254"),  # noqa: S104
    *("100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1"),
    *("239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1"),
    *("::ffff:10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1"),
    *(
        "2002:7f00:1::",
        "2002:a00:1::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "fc00::1",
        "fd12::1",
        "fe80::1",
    ),
    *("fec0::1", "ff02::1", "2001:db8::1", "100::1"),
)
PUBLIC = ("93.184.216.34", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101")
HTTP = {"allow_http": True}


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_is_not_public_is_refused(address):
    rule = AddressRule(WebhookSettings())
    with pytest.raises(AddressRefusedError, match="private or reserved"):
        rule.check(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(AddressRefusedError, match="private or reserved"):
        rule.check_url(f"https://{host}/inbox")


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_may_be_called(address):
    rule = AddressRule(WebhookSettings())
    rule.check(ipaddress.ip_address(address))
    rule.check_url(f"https://{f'[{address}]' if ':' in address else address}:8443/inbox")


def test_an_address_in_an_allowed_network_may_be_called_also_in_an_ipv6_form_of_it():
    rule = AddressRule(WebhookSettings(allow_networks="10.0.0.0/8, fd00::/8"))
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::a01:203", "fd12::1"):
        rule.check(ipaddress.ip_address(address))
    for address in ("127.0.0.1", "192.168.0.1", "::ffff:127.0.0.1", "fc00::1"):
        with pytest.raises(AddressRefusedError):
            rule.check(ipaddress.ip_address(address))


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0x7f.1"])
def test_other_spellings_of_an_address_are_refused_before_and_at_the_call(host):
    with pytest.raises(AddressRefusedError):
        AddressRule(WebhookSettings()).check_url(f"https://{host}/")
    called_nobody(f"http://{host}:{{port}}/", **HTTP)


def test_http_needs_a_setting():
    with pytest.raises(AddressRefusedError, match=r"webhooks\.allow_http"):
        AddressRule(WebhookSettings()).check_url("http://example.org/")
    AddressRule(WebhookSettings(**HTTP)).check_url("http://example.org/")


def test_a_setting_with_something_else_than_networks_is_refused():
    with pytest.raises(ValueError, match="expected networks"):
        WebhookSettings(allow_networks="10.0.0.0/8, localhost")


def called(url, **settings):
    """Call a URL once, and return the result."""

    async def run():
        client = WebhookClient(WebhookSettings(timeout_s=5.0, connect_timeout_s=2.0, **settings))
        try:
            return await client.call(Target("ann", 1, url, (SECRET,)), "m1", b"{}")
        finally:
            await client.close()

    return asyncio.run(run())


def called_nobody(url, **settings):
    """A URL with the port of a receiver on the loopback address is refused, and the receiver is not called."""
    with receiving() as receiver:
        result = called(url.format(port=receiver.port), **settings)
        assert receiver.calls == []
    assert (result.is_ok, result.status) == (False, None)
    assert result.why == "its address is private or reserved (webhooks.allow_networks)"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "localhost"])
def test_a_receiver_on_this_machine_is_not_called_under_any_of_its_names(host):
    called_nobody(f"http://{host}:{{port}}/", **HTTP)


def test_a_name_with_a_public_and_a_private_address_is_refused(monkeypatch):
    resolved_as(monkeypatch, "1.1.1.1", "127.0.0.1")
    called_nobody("http://two.example:{port}/", **HTTP)


def test_the_connection_goes_to_the_address_that_was_checked_with_the_name_of_the_url(monkeypatch):
    # The second look-up would lead elsewhere, as with DNS rebinding.
    resolved_as(monkeypatch, "127.0.0.1", then=("10.255.255.1",))
    with receiving() as receiver:
        result = called(f"http://hook.example:{receiver.port}/a", allow_networks="127.0.0.0/8", **HTTP)
        assert result.is_ok, result
        (call,) = receiver.calls
    assert call.headers["host"] == f"hook.example:{receiver.port}"


@pytest.mark.requirement("WH-06")
def test_a_dead_address_of_a_host_does_not_hide_the_next_one(monkeypatch):
    """Packets to the first address are lost, as behind a firewall: its listener has a full queue."""
    with dead_listener("127.0.0.2") as port, receiving(host="127.0.0.3", port=port) as receiver:
        resolved_as(monkeypatch, "127.0.0.2", "127.0.0.3", then=("127.0.0.2", "127.0.0.3"))
        result = called(f"http://hook.example:{port}/a", allow_networks="127.0.0.0/8", **HTTP)
        assert result.is_ok, result
        assert len(receiver.calls) == 1
    assert 0.2 < result.seconds < 1.5


@pytest.mark.long
@pytest.mark.requirement("WH-06")
def test_all_addresses_of_a_host_share_the_time_of_a_connection(monkeypatch):
    with dead_listener("127.0.0.2") as port:
        resolved_as(monkeypatch, *["127.0.0.2"] * 3, then=["127.0.0.2"] * 3)
        result = called(f"http://hook.example:{port}/a", allow_networks="127.0.0.0/8", **HTTP)
    assert result.why == "no connection within 2 s"
    assert result.seconds < 3


def test_an_unknown_name_is_a_failure_with_a_reason(monkeypatch):
    def unknown(*_args, **_options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    result = called("https://nobody.example/")
    assert (result.is_ok, result.why) == (False, "no answer: ConnectError")


@contextmanager
def dead_listener(host):
    """A port of a loopback address that answers no packet: the queue of its listener is full."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind((host, 0))
        listener.listen(0)
        for _ in range(4):
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def resolved_as(monkeypatch, *addresses, then=None):
    """Names have these addresses; after the first look-up of a name, those of `then`."""
    true, looked_up = socket.getaddrinfo, []

    def resolve(host, port, *args, **options):
        if not str(host).endswith(".example"):
            return true(host, port, *args, **options)
        looked_up.append(host)
        found = addresses if then is None or len(looked_up) == 1 else then
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
