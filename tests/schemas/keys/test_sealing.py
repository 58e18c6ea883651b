"""Sealed values and the master key's file (CM-05)."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from schemas.keys.sealing import Keyring, UnsealError, ensure_keyring, load_keyring
from schemas.settings.settings import PROJECT_ROOT, Settings, SettingsError
from tests.schemas.job_records import JOB_ID, KEYRING, SECRET, sealed

pytestmark = pytest.mark.requirement("CM-05")

PURPOSES = st.text(max_size=20)
OLD, NEW = bytes(range(32)), bytes(range(32, 64))


@given(st.binary(max_size=200), PURPOSES, PURPOSES)
@settings(max_examples=80, deadline=None)
def test_a_sealed_value_opens_for_its_purpose_and_no_other(plaintext: bytes, purpose: str, other: str) -> None:
    text = KEYRING.seal(plaintext, purpose)
    assert KEYRING.open(text, purpose) == plaintext
    assert text == Keyring({"k1": OLD}, "k1").seal(plaintext, purpose), "a replayed batch writes the same bytes"
    if other != purpose:
        assert KEYRING.seal(plaintext, other) != text
        with pytest.raises(UnsealError):
            KEYRING.open(text, other)


@given(st.binary(min_size=1, max_size=60), st.integers(0), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_a_changed_byte_is_noticed(plaintext: bytes, place: int, change: int) -> None:
    key_id, _, text = KEYRING.seal(plaintext, "p").partition(":")
    raw = bytearray(base64.b64decode(text))
    raw[place % len(raw)] ^= change
    with pytest.raises(UnsealError):
        KEYRING.open(f"{key_id}:{base64.b64encode(raw).decode()}", "p")


@given(st.text(max_size=40) | st.text(max_size=40).map("k1:".__add__))
def test_text_that_was_never_sealed_does_not_open(text: str) -> None:
    with pytest.raises(UnsealError) as caught:
        KEYRING.open(text, "p")
    assert len(str(caught.value)) < 400


@given(st.binary(min_size=8, max_size=60))
def test_nothing_of_the_plaintext_shows(plaintext: bytes) -> None:
    raw = base64.b64decode(KEYRING.seal(plaintext, "p").partition(":")[2])
    assert plaintext not in raw


def test_after_a_rotation_new_values_use_the_new_key_and_old_ones_still_open() -> None:
    both = Keyring({"k1": OLD, "k2": NEW}, "k2")
    assert both.open(KEYRING.seal(b"x", "p"), "p") == b"x"
    assert both.seal(b"x", "p").startswith("k2:")
    with pytest.raises(UnsealError, match="no master key with the id 'k2'"):
        KEYRING.open(both.seal(b"x", "p"), "p")


@pytest.mark.parametrize(
    ("keys", "active"),
    [({}, "k1"), ({"k1": OLD}, "k2"), ({"k1": OLD[:-1]}, "k1"), ({"k 1": OLD}, "k 1"), ({"a/b": OLD}, "a/b")],
)
def test_a_keyring_needs_named_keys_of_32_bytes_and_an_active_one(keys: dict[str, bytes], active: str) -> None:
    with pytest.raises(ValueError, match="a keyring needs"):
        Keyring(keys, active)


def test_the_signer_of_a_secret_belongs_to_one_job() -> None:
    keyring = Keyring({"k1": OLD}, "k1")
    signer = keyring.job_signer(sealed(), JOB_ID)
    assert keyring.job_signer(sealed(), JOB_ID) is signer
    for _ in range(2):
        with pytest.raises(UnsealError):
            keyring.job_signer(sealed(), "00000000")
    assert keyring.job_signer(sealed(), JOB_ID).hexdigest(b"x") == signer.hexdigest(b"x")
    assert SECRET not in repr(vars(keyring))


def test_the_key_file_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    chosen = Settings(data_dir=tmp_path / "data")
    first = ensure_keyring(chosen)
    assert stat.S_IMODE(chosen.key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(chosen.key_file.parent.stat().st_mode) == 0o700
    assert list(chosen.key_file.parent.iterdir()) == [chosen.key_file], "no draft is left"
    again = ensure_keyring(chosen)
    assert again.open(first.seal(b"x", "p"), "p") == b"x"
    assert load_keyring(chosen).active == first.active


def test_a_wide_umask_does_not_open_the_key_file(tmp_path: Path) -> None:
    chosen, before = Settings(data_dir=tmp_path), os.umask(0)
    try:
        ensure_keyring(chosen)
    finally:
        os.umask(before)
    assert stat.S_IMODE(chosen.key_file.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_file_that_others_can_read_is_refused_with_the_way_to_mend_it(tmp_path: Path, mode: int) -> None:
    chosen = Settings(data_dir=tmp_path)
    ensure_keyring(chosen)
    chosen.key_file.chmod(mode)
    with pytest.raises(SettingsError, match=r"readable by others \(mode .*; run: chmod 600"):
        load_keyring(chosen)


def test_a_missing_key_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"master_key_file: .* is missing; './trunkline up' makes it"):
        load_keyring(Settings(data_dir=tmp_path))


NO_KEYRINGS = (
    "",
    "secret-canary",
    "[]",
    "{}",
    '{"active":"k1","keys":[]}',
    '{"active":"k1","keys":{"k1":"canary"}}',
    '{"active":"k1","keys":{"k1":7}}',
    '{"active":"k2","keys":{"k1":"' + base64.b64encode(OLD).decode() + '"}}',
)


@pytest.mark.parametrize("text", NO_KEYRINGS)
def test_a_master_key_that_is_none_is_a_settings_error_that_does_not_quote_it(text: str) -> None:
    with pytest.raises(SettingsError, match="master_key: not a keyring") as caught:
        load_keyring(Settings(master_key=SecretStr(text)))
    assert "canary" not in str(caught.value)


def test_a_master_key_from_the_environment_needs_no_file(tmp_path: Path) -> None:
    text = json.dumps({"active": "k1", "keys": {"k1": base64.b64encode(OLD).decode()}})
    chosen = Settings(data_dir=tmp_path / "none", master_key=SecretStr(text))
    assert ensure_keyring(chosen).open(KEYRING.seal(b"x", "p"), "p") == b"x"
    assert not (tmp_path / "none").exists()
    assert text not in repr(chosen)


MAKES_KEYS = """
import sys
from pathlib import Path
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import Settings
print("ready", flush=True)
sys.stdin.readline()
print(*(ensure_keyring(Settings(data_dir=Path(sys.argv[1]) / str(n))).active for n in range(100)))
"""


@pytest.mark.long
def test_processes_that_make_the_key_at_once_end_with_the_same_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKES_KEYS, str(tmp_path)]
    started = [
        subprocess.Popen(command, cwd=PROJECT_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    stored = [load_keyring(Settings(data_dir=tmp_path / str(n))).active for n in range(100)]
    assert answers == [stored, stored]
