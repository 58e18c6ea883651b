"""`trunkline settings`: values, where they come from, and the sample file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from connectors.cli.main import main
from connectors.cli.stack.settings_command import all_settings
from schemas.settings.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file of the test's own."""
    path = tmp_path / "trunkline.yaml"
    path.write_text("views:\n  interval_ms: 700\nkafka:\n  topic: of.the.file\n")
    monkeypatch.setenv("TRUNKLINE_CONF", str(path))
    return path


@pytest.mark.requirement("HO-10")
def test_each_value_is_shown_with_the_source_that_won(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRUNKLINE__KAFKA__TOPIC", "of.the.variable")
    monkeypatch.setenv("MQTT_PORT", "1999")
    assert main(["settings"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["kafka.topic"].split() == ["of.the.variable", "TRUNKLINE__KAFKA__TOPIC"]
    assert lines["mqtt.port"].split() == ["1999", "MQTT_PORT"]
    assert lines["views.interval_ms"].split() == ["700", str(file)]
    assert lines["gateway.port"].split() == ["3200", "default"]
    assert lines.keys() - {"setting"} == {one.name for one in all_settings()}


@pytest.mark.requirement("HO-10")
def test_a_secret_is_never_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MQTT_PASSWORD", "not-to-be-seen")
    for arguments in ([], ["--json"], ["--sample"]):
        assert main(["settings", "mqtt", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "not-to-be-seen" not in shown
    assert "mqtt.password" in shown


@pytest.mark.requirement("HO-10")
def test_json_has_type_bounds_description_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "gateway.port", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["settings"]
    assert (found["type"], found["bounds"], found["value"]) == ("integer", "at least 1, at most 65,535", 3200)
    assert (found["variable"], found["default"]) == ("TRUNKLINE__GATEWAY__PORT", 3200)
    assert found["description"]


@pytest.mark.requirement("HO-10")
def test_an_unknown_name_is_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "gateway.prot"]) == 2
    assert "no such setting or section: gateway.prot" in capsys.readouterr().err


@pytest.mark.requirement("HO-10")
def test_the_sample_file_changes_nothing_and_uncommented_holds_every_default(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["settings", "--sample"]) == 0
    sample = capsys.readouterr().out
    file.write_text(sample)
    assert load_settings({}, file) == Settings()
    header, _, rest = sample.partition("\n")
    assert header.startswith("# Settings of Trunkline")
    file.write_text(re.sub(r"^# ", "", rest, flags=re.MULTILINE))
    assert load_settings({}, file) == Settings()
    named = {line.split(":")[0].strip("# ") for line in sample.splitlines() if re.match(r"# +\w+: ", line)}
    assert named >= {one.name.rpartition(".")[2] for one in all_settings() if not one.is_secret}


@pytest.mark.requirement("HO-11")
def test_every_setting_has_a_description_that_is_a_sentence() -> None:
    wrong = [one.name for one in all_settings() if not re.fullmatch(r"[A-Z`].+\.", one.description)]
    assert wrong == []


@pytest.mark.requirement("HO-11")
def test_every_number_has_a_bound() -> None:
    assert [one.name for one in all_settings() if one.type in {"integer", "number"} and not one.bounds] == []
