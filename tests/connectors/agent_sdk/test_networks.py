"""The ways of the libraries to a hub: by a proxy of the environment, and to a host with several addresses."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from connectors.plumbing.tls_keys.tls_authority import new_authority, new_leaf
from schemas.settings.settings import PROJECT_ROOT
from tests.connectors.agent_sdk.hub_runners import RUNNERS, running
from tests.connectors.agent_sdk.small_proxy import dropping, proxying, resolving
from tests.connectors.agent_sdk.small_server import SmallServer, always, answer, serving
from tests.programs import required_program, run_program
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import BackboneUnreachable, UsageError
from trunkline_agent.hub.hub_address import proxy_of
from trunkline_agent.hub.hub_requests import get_json
from trunkline_agent.hub.plans import Retries

HUB = "hub.test"
NO_RETRY = Retries(patience_s=0.0)
LOGIN = "Basic YW5uOnMzOmNyZXQ="  # ann and s3:cret
VECTORS = json.loads((PROJECT_ROOT / "connectors/agent_sdk/vectors/hub.json").read_bytes())["proxies"]
JAVASCRIPT = PROJECT_ROOT / "connectors" / "agent_sdk" / "js" / "trunkline_agent.js"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
# Asks the hub as an agent of the library, and prints what came of it. `lookup`: the addresses of each host.
PROGRAM = """
import dns from "node:dns";
const { url, ca, lookup } = JSON.parse(process.argv[1]);
if (lookup) dns.lookup = (host, options, done) => done(null, lookup.map((address) => ({ address, family: 4 })));
const { Agent, Credentials } = await import(%s);
const credentials = new Credentials({ hub: { url, token: "the-token" }, caCerts: ca });
const agent = new Agent(null, credentials, { patienceS: 0 });
const begin = performance.now();
const found = await agent.discover().then((agents) => ({ agents }), ({ name, message }) => ({ name, message }));
console.log(JSON.stringify({ ...found, seconds: (performance.now() - begin) / 1000 }));
await agent.close();
"""


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(params=[*RUNNERS, pytest.param("javascript", marks=pytest.mark.node)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """The authority of a server at `hub.test`, and the server's context."""
    folder, authority = tmp_path_factory.mktemp("tls"), new_authority()
    leaf = new_leaf(authority, "gateway", [HUB])
    contents = {"ca": authority.certificate_pem, "key": leaf.key_pem, "certificate": leaf.certificate_pem}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate", folder / "key")
    return folder / "ca", context


def asked(kind: str, server: SmallServer, ca: Path | None = None, lookup: list[str] | None = None) -> Any:
    """Ask the hub for its participants; the result, or the text of the error."""
    url = f"{server.scheme}://{HUB}:{server.port}"
    if kind in RUNNERS:
        try:
            with running(kind, HubAccess(url, "the-token"), ca_certs=None if ca is None else str(ca)) as client:
                return client.run(get_json("/api/hub/participants", retries=NO_RETRY))["participants"]
        except BackboneUnreachable as error:
            return str(error)
    given = json.dumps({"url": url, "ca": None if ca is None else str(ca), "lookup": lookup})
    command = [required_program("nodejs", "node"), "--input-type=module", "--eval"]
    program = PROGRAM % json.dumps(JAVASCRIPT.as_uri())
    done = run_program([*command, program, given], 60, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seconds"] < 4.5
    return found.get("agents", found.get("message"))


NOBODY = always(answer(200, b'{"participants": []}'))


@pytest.mark.requirement("AG-97")
@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
def test_a_hub_with_tls_is_reached_by_connect(
    kind: str, tls: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    ca, context = tls
    with serving(NOBODY, context) as server, proxying(LOGIN) as proxy:
        monkeypatch.setenv(variable, proxy.url.replace("http://", "http://ann:s3%3Acret@"))
        assert asked(kind, server, ca) == []
        assert proxy.asked == [("CONNECT", f"{HUB}:{server.port}")]
        assert server.heard[0].headers["host"] == f"{HUB}:{server.port}"
        assert "proxy-authorization" not in server.heard[0].headers
        # A proxy that refuses is named, without its login.
        monkeypatch.setenv(variable, proxy.url.replace("http://", "http://ann:wrong@"))
        refusal = asked(kind, server, ca)
        assert "407" in refusal and f"by the proxy {proxy.url}" in refusal and "wrong" not in refusal
        assert len(server.heard) == 1


@pytest.mark.requirement("AG-97")
def test_a_hub_without_tls_is_asked_for_by_its_whole_address(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(NOBODY) as server, proxying(LOGIN) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("http://", "ann:s3%3Acret@"))
        assert asked(kind, server) == []
        target = f"http://{HUB}:{server.port}/api/hub/participants"
        assert proxy.asked == [("GET", target)] and server.heard[0].target == target
        assert server.heard[0].headers["host"] == f"{HUB}:{server.port}"
        monkeypatch.setenv("NO_PROXY", "other.example,.test")
        assert "proxy" not in asked(kind, server)
        assert len(proxy.asked) == 1


@pytest.mark.requirement("AG-97")
@pytest.mark.parametrize("one", VECTORS, ids=lambda one: str(one["name"]))
def test_the_environment_names_the_proxy(one: dict[str, Any]) -> None:
    found = urlsplit(one["url"])
    is_tls = found.scheme == "https"
    given = (found.hostname or "", found.port or (443 if is_tls else 80), is_tls, one["environment"])
    if one["proxy"] == "refused":
        with pytest.raises(UsageError) as refused:
            proxy_of(*given)
        assert "secret" not in str(refused.value)
        return
    proxy = proxy_of(*given)
    assert (proxy and proxy.url) == one["proxy"]
    assert (proxy and proxy.authorization) == one["authorization"] and "Basic" not in repr(proxy)


@pytest.fixture
def two_addresses() -> Iterator[list[str]]:
    """The addresses of the hub's host, in the order in which they are tried."""
    addresses = ["127.0.0.2", "127.0.0.1"]
    with resolving(HUB, addresses):
        yield addresses


@pytest.mark.requirement("AG-98")
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_an_address_that_drops_packets_delays_the_next_one_by_a_moment(
    kind: str, two_addresses: list[str], tls: tuple[Path, ssl.SSLContext], is_tls: bool
) -> None:
    ca, context = tls if is_tls else (None, None)
    with serving(NOBODY, context) as server, dropping("127.0.0.2", server.port):
        begun = time.monotonic()
        assert asked(kind, server, ca, two_addresses) == []
        assert time.monotonic() - begun < 4.5
        assert len(server.heard) == 1


@pytest.mark.requirement("AG-98")
def test_hosts_whose_addresses_fail_fail_in_time(kind: str, two_addresses: list[str]) -> None:
    with serving(NOBODY) as server:
        # The first one refuses.
        assert asked(kind, server, None, two_addresses) == []
        two_addresses.reverse()
        assert asked(kind, server, None, two_addresses) == []
        port = server.port
    gone = SmallServer(NOBODY, port=port)
    refusal = asked(kind, gone, None, two_addresses)
    assert f"{HUB}:{port}" in refusal and "does not answer" in refusal
