"""The authority's files: made once, kept while they are good, and made anew for a reason that is told."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from connectors.cli.main import main
from connectors.plumbing.tls_keys.tls_authority import new_authority, new_leaf, why_not_good
from connectors.plumbing.tls_keys.tls_files import SERVERS, client_name, create
from trunkline_agent.errors import Refused, TrunklineError, UsageError

pytestmark = pytest.mark.requirement("JE-23")


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_is_made_at_once_and_every_file_is_its_owners_alone(tmp_path: Path) -> None:
    made = create(tmp_path / "tls", mutual=True)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in made.folder.rglob("*") if p.is_file()}
    assert set(modes.values()) == {0o600} and stat.S_IMODE(made.folder.stat().st_mode) == 0o700
    assert {
        "ca.key",
        "mosquitto.key",
        "kafka.pem",
        "kafka-internal.pem",
        "kafka.password",
    } <= modes.keys()
    for file in made.files:
        assert file.why == "there was none"
    assert set(made.of("mosquitto").hosts) == {"127.0.0.1", "localhost"}


def test_a_strict_verifier_and_openssl_take_what_was_made(tmp_path: Path) -> None:
    made = create(tmp_path / "tls", ["broker.example", "192.0.2.7", "::1"], mutual=True)
    openssl = shutil.which("openssl")
    assert openssl is not None
    ca = str(made.of("ca").certificate)
    for name in (*SERVERS, client_name("agent")):
        purpose = "sslclient" if "/" in name else "sslserver"
        command = [openssl, "verify", "-x509_strict", "-purpose", purpose, "-CAfile", ca]
        done = subprocess.run(
            [*command, str(made.of(name).certificate)], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stderr
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(made.of(name).certificate, made.of(name).key)
    agent = x509.load_pem_x509_certificate(made.of(client_name("agent")).certificate.read_bytes())
    usage = agent.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [one.dotted_string for one in usage] == ["1.3.6.1.5.5.7.3.2"], "a client's is no server's"


def test_run_again_it_changes_nothing_and_a_further_host_only_the_servers(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    create(folder, ["one.example"], mutual=True)
    before = contents(folder)
    again = create(folder)
    assert contents(folder) == before and all(file.why is None for file in again.files)
    more = create(folder, ["Two.example"])
    assert {file.name for file in more.files if file.why is not None} == set(SERVERS)
    assert more.of("gateway").why == "it does not name two.example"
    assert set(more.of("gateway").hosts) == {"127.0.0.1", "localhost", "one.example", "two.example"}


def test_what_is_broken_is_mended_and_renewal_keeps_the_authority(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    made = create(folder)
    made.of("gateway").key.write_bytes(made.of("kafka").key.read_bytes())
    made.of("mosquitto").certificate.write_text("rubbish")
    mended = create(folder)
    assert {file.name for file in mended.files if file.why is not None} == {"gateway", "mosquitto"}
    before = contents(folder)
    create(folder, renew=True)
    changed = {name for name, content in contents(folder).items() if content != before[name]}
    assert "gateway.crt" in changed and "kafka.pem" in changed and "kafka-internal.pem" in changed
    assert not changed & {"ca.crt", "ca.key", "kafka.password"}
    assert create(folder, renew_authority=True).of("gateway").why == "another authority signed it"


@pytest.mark.parametrize("renew", [False, True])
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("ca.key", None),
        ("ca.key", "rubbish"),
        ("ca.key", "another"),
        ("ca.crt", None),
        ("ca.crt", "rubbish"),
    ],
    ids=["no key", "damaged key", "another key", "no certificate", "damaged certificate"],
)
def test_an_authority_that_is_not_whole_is_replaced_only_when_that_is_asked_for(
    tmp_path: Path, name: str, left: str | None, renew: bool
) -> None:
    folder = tmp_path / "tls"
    create(folder, mutual=True)
    whole = (folder / name).read_bytes()
    if left is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(new_authority().key_pem if left == "another" else left.encode())
    before = contents(folder)
    with pytest.raises(Refused, match=r"restore .* --renew-ca"):
        create(folder, ["more.example"], renew=renew)
    assert contents(folder) == before, "nothing was written"
    (folder / name).write_bytes(whole)
    (folder / "ca.key").chmod(0o600)
    assert all(file.why is None for file in create(folder).files)
    (folder / name).unlink()
    new = create(folder, renew_authority=True)
    assert new.of("gateway").why == "another authority signed it"
    assert all(file.why is None for file in create(folder).files)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_an_authoritys_key_that_others_can_read_signs_nothing_until_the_operator_has_judged_it(
    tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "tls"
    key = create(folder).of("ca").key
    key.chmod(mode)
    before = contents(folder)
    for renew in (False, True):
        with pytest.raises(Refused, match=rf"mode {mode:o}.*chmod 600 {key} .*--renew-ca"):
            create(folder, ["more.example"], mutual=True, renew=renew)
    assert contents(folder) == before and stat.S_IMODE(key.stat().st_mode) == mode, "nothing was written"
    key.chmod(0o600)
    assert all(file.why is None for file in create(folder).files)
    key.chmod(mode)
    assert create(folder, renew_authority=True).of("gateway").why == "another authority signed it"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_private_file_that_others_can_read_is_told_and_neither_hidden_nor_taken_from_whom_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tls"
    assert create(folder, mutual=True).exposed == []
    before = contents(folder)
    told = {
        "kafka.password": 0o644,
        "kafka.pem": 0o640,
        "kafka-internal.pem": 0o604,
        "clients/agent.key": 0o620,
    }
    for name, mode in told.items():
        (folder / name).chmod(mode)
    assert main(["tls", "create", "--dir", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["exposed"]) == {str(folder / name) for name in told}
    assert main(["tls", "create", "--dir", str(folder)]) == 0
    said = capsys.readouterr().out
    for name, mode in told.items():
        assert f"Others can read {folder / name} (mode {mode:o}): chmod 600 {folder / name}" in said
        assert stat.S_IMODE((folder / name).stat().st_mode) == mode
    assert contents(folder) == before
    (folder / "kafka.password").unlink()
    assert create(folder, renew=True).exposed == [], "what is made anew is its owner's alone"
    assert contents(folder)["kafka.password"] != before["kafka.password"]


def test_an_authority_that_was_broken_off_before_anybody_saw_it_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    folder.mkdir()
    (folder / "ca.key").write_bytes(new_authority().key_pem)
    assert create(folder).of("ca").why == "there was none"


def test_what_ends_soon_is_not_good_and_nothing_outlives_its_authority() -> None:
    now = datetime.now(UTC)
    authority = new_authority(now - timedelta(days=3600))
    server = new_leaf(authority, "s", ["localhost"], now)
    assert server.certificate.not_valid_after_utc == authority.certificate.not_valid_after_utc
    assert (why_not_good(server, authority) or "") == ""
    soon = now + timedelta(days=30)
    assert (why_not_good(server, authority, now=soon) or "").startswith("it ends on")
    assert why_not_good(new_leaf(new_authority(), "c"), authority) == "another authority signed it"
    assert why_not_good(server, authority, ["other"]) == "it does not name other"


@pytest.mark.parametrize(
    "host", ["a b", "", "-", "a..b", "x" * 64, "ü.example", "*.example", "a/b", "1.2.3.4:80"]
)
def test_what_is_no_host_is_refused_before_anything_is_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="--host"):
        create(tmp_path / "tls", [host])
    assert not (tmp_path / "tls").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrunklineError, match="cannot write below"):
        create(tmp_path / "file" / "tls")


def test_the_command_says_what_it_made_until_when_and_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRUNKLINE__DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TRUNKLINE_CONF", os.devnull)
    assert main(["tls", "create", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(file["made"] for file in found["files"]) and found["folder"] == str(tmp_path / "keys" / "tls")
    assert found["settings"]["mqtt"] == {"tls": True, "ca_certs": str(tmp_path / "keys" / "tls" / "ca.crt")}
    assert main(["tls", "create", "--mutual", "--dir", str(tmp_path / "other")]) == 0
    told = capsys.readouterr().out
    assert f'tls_dir: "{tmp_path / "other"}"' in told and "require_client_cert: true" in told
    assert f"{datetime.now(UTC).year + 2}-" in told
    keys = [path.read_text().strip() for path in tmp_path.rglob("*.password")]
    assert len(keys) == 2 and not any(key in told + json.dumps(found) for key in keys)
    assert main(["tls", "create", "--host", "a b"]) == 2
    (tmp_path / "other" / "ca.key").chmod(0o644)
    assert main(["tls", "create", "--dir", str(tmp_path / "other")]) == 4
    assert f"chmod 600 {tmp_path / 'other' / 'ca.key'}" in capsys.readouterr().err
    (tmp_path / "other" / "ca.key").unlink()
    assert main(["tls", "create", "--dir", str(tmp_path / "other")]) == 4
    assert "--renew-ca" in capsys.readouterr().err
