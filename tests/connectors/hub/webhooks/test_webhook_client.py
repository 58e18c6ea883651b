"""One call of a webhook: what counts as success, and what a hostile receiver can do (WH-02, WH-03, WH-04)."""

from __future__ import annotations

import asyncio
import ssl
import time
from email.utils import formatdate

import pytest

from connectors.hub.webhooks.webhook_client import Target, WebhookClient, new_webhook_secret, signature_headers
from connectors.plumbing.tls_keys.tls_authority import new_authority, new_leaf
from schemas.settings.settings import WebhookSettings
from tests.connectors.hub.webhooks.receiver import Answer, receiving
from tests.connectors.hub.webhooks.standard_webhooks import verify
from tests.connectors.hub.webhooks.webhook_hub import SECRET

OTHER = new_webhook_secret(b"o" * 32)
LOCAL = {"allow_networks": "127.0.0.0/8", "allow_http": True}


def called(url, secrets=(SECRET,), times=1, **settings):
    """Call a URL some times with one client, and return the last result."""

    async def run():
        client = WebhookClient(WebhookSettings(**{"timeout_s": 5.0, **LOCAL, **settings}))
        try:
            for _ in range(times):
                result = await client.call(Target("ann", 1, url, secrets), "m1", b'{"a": 1}')
            return result
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.mark.requirement("WH-02")
@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_each_form_of_a_date_in_retry_after_is_in_utc(zone, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        at = time.gmtime(time.time() + 20)
        for form in ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"):
            with receiving() as receiver:
                receiver.answers = [Answer(503, {"Retry-After": time.strftime(form, at)})]
                assert 15 <= called(receiver.url).retry_after_s <= 21, form
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.requirement("WH-07")
def test_the_same_message_id_in_two_mailboxes_has_two_webhook_ids():
    with receiving() as receiver:

        async def run():
            client = WebhookClient(WebhookSettings(**LOCAL))
            try:
                for webhook in ("ann", "bo", "ann"):
                    await client.call(Target(webhook, 1, receiver.url, (SECRET,)), "r-1", b"{}")
            finally:
                await client.close()

        asyncio.run(run())
        first, other, again = (call.headers["webhook-id"] for call in receiver.calls)
    assert first == again != other
    assert "." not in first


@pytest.mark.requirement("WH-03")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_its_target_is_never_called(status):
    with receiving() as target, receiving() as receiver:
        receiver.answers = [Answer(status, {"Location": target.url})]
        result = called(receiver.url)
        assert (len(receiver.calls), target.calls) == (1, [])
    assert (result.is_ok, result.status) == (False, status)
    assert result.why == f"HTTP status {status}: redirects are not followed"


@pytest.mark.requirement("WH-02")
@pytest.mark.parametrize(
    ("status", "is_ok"), [(200, True), (204, True), (299, True), (400, False), (500, False)]
)
def test_a_status_of_200_to_299_is_a_success_and_any_other_a_failure(status, is_ok):
    with receiving() as receiver:
        receiver.answers = [Answer(status)]
        result = called(receiver.url)
    assert (result.is_ok, result.status, bool(result.why)) == (is_ok, status, not is_ok)


@pytest.mark.requirement("WH-02")
def test_an_answer_that_takes_too_long_ends_with_the_time_limit():
    with receiving() as receiver:
        receiver.answers = [Answer(200, delay_s=30)]
        began = time.monotonic()
        result = called(receiver.url, timeout_s=0.3)
        assert time.monotonic() - began < 5
    assert (result.status, result.why) == (None, "no answer within 0.3 s")


@pytest.mark.requirement("WH-02")
def test_nothing_of_a_long_answer_is_kept_and_its_end_is_not_awaited():
    with receiving() as receiver:
        receiver.answers = [Answer(200, body=b"secret" * 1_000_000), Answer(500, body=b"secret" * 1_000_000)]
        assert called(receiver.url).is_ok
        result = called(receiver.url)
    assert result.why == "HTTP status 500"


@pytest.mark.requirement("WH-02")
def test_nobody_at_the_address_and_no_http_there_are_failures():
    with receiving() as receiver:
        port = receiver.port
    assert called(f"http://127.0.0.1:{port}/").why == "no answer: ConnectError"
    assert called(f"https://127.0.0.1:{port}/").why == "no answer: ConnectError"


@pytest.mark.requirement("WH-02")
@pytest.mark.parametrize(
    ("value", "seconds"),
    [("120", 120.0), (None, 3600.0), ("soon", None), ("-5", None)],
    ids=["seconds", "date", "no number", "negative"],
)
def test_the_seconds_of_retry_after_are_read_from_a_number_or_a_date(value, seconds):
    with receiving() as receiver:
        header = value or formatdate(time.time() + 3600, usegmt=True)
        receiver.answers = [Answer(503, {"Retry-After": header})]
        found = called(receiver.url).retry_after_s
    assert found is None if seconds is None else abs(found - seconds) < 60


@pytest.mark.requirement("WH-03")
def test_no_proxy_of_the_environment_is_used(monkeypatch):
    with receiving() as proxy, receiving() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert called(receiver.url).is_ok
        assert (len(receiver.calls), proxy.calls) == (1, [])


@pytest.mark.requirement("WH-03")
def test_a_certificate_of_another_name_or_authority_is_refused(tls_receiver):
    port, authority = tls_receiver
    assert called(f"https://localhost:{port}/", ca_certs=authority, allow_networks="127.0.0.0/8,::1").is_ok
    refused = called(f"https://localhost:{port}/", allow_networks="127.0.0.0/8, ::1")
    assert (refused.status, refused.why) == (None, "no answer: ConnectError")
    other = called(f"https://127.0.0.2:{port}/", ca_certs=authority)
    assert (other.status, other.why) == (None, "no answer: ConnectError")


@pytest.mark.requirement("WH-04")
def test_while_a_secret_is_rotated_each_of_the_two_verifies_a_call():
    with receiving() as receiver:
        assert called(receiver.url, secrets=(OTHER, SECRET)).is_ok
        (call,) = receiver.calls
    for secret in (SECRET, OTHER):
        verify(secret, call.headers, call.body)
    with pytest.raises(AssertionError):
        verify(new_webhook_secret(b"x" * 32), call.headers, call.body)


@pytest.mark.requirement("WH-04")
def test_the_example_of_the_specification_has_this_signature():
    # From the test vectors of the Standard Webhooks libraries.
    headers = signature_headers((SECRET,), "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.fixture
def tls_receiver(tmp_path):
    """A receiver with TLS for the name localhost: its port, and the file of its authority."""
    authority = new_authority()
    leaf = new_leaf(authority, "receiver", ["localhost"])
    trusted, own = tmp_path / "authority.pem", tmp_path / "own.pem"
    trusted.write_bytes(authority.certificate_pem)
    own.write_bytes(leaf.key_pem + leaf.certificate_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    with receiving(context) as receiver:
        yield receiver.port, trusted
