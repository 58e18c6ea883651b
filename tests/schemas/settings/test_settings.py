"""Settings: what is read from where, what is refused, and how a child process gets the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from schemas.settings.settings import (
    AgentMcpSettings,
    GatewaySettings,
    KafkaSettings,
    LimitSettings,
    MqttSettings,
    Settings,
    SettingsError,
    SparkSettings,
    StorageSettings,
    load_settings,
    settings_environment,
)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A settings file that says nothing."""
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return path


def written(tmp_path: Path, text: str) -> Path:
    """A settings file with `text`."""
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_and_variables_the_defaults_hold(empty: Path) -> None:
    assert load_settings({}, empty) == Settings()


@pytest.mark.parametrize(
    ("variable", "named"),
    [
        ("TRUNKLINE__KAFK__TOPIC", "kafk"),
        ("TRUNKLINE__KAFKA__TOPIK", "kafka.topik"),
        ("TRUNKLINE__TOPIC", "topic"),
        ("TRUNKLINE__", "Extra inputs"),
        ("TRUNKLINE__KAFKA", "kafka"),
        ("TRUNKLINE__KAFKA__TOPIC__NAME", "kafka.topic"),
        ("TRUNKLINE__KAFKA_TOPIC", "kafka_topic"),
        ("TRUNKLINE__KAFKA__PARTITIONS", "kafka.partitions"),
    ],
)
def test_a_variable_that_is_no_setting_stops_the_program_and_is_named(
    empty: Path, variable: str, named: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({variable: "no number"}, empty)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kafk: {topic: x}", "kafk"),
        ("kafka: {topik: x}", "kafka.topik"),
        ("kafka: [topic]", "kafka"),
        ("kafka: {partitions: 0}", "kafka.partitions"),
        ("mqtt: {port: 65536}", "mqtt.port"),
        ("mqtt: {topic_prefix: 'a/+/b'}", "mqtt.topic_prefix"),
        ("mqtt: {topic_prefix: 'a/'}", "mqtt.topic_prefix"),
        ("limits: {payload_bytes: 1}", "limits.payload_bytes"),
        ("- a list", "expected a mapping"),
        ("just text", "expected a mapping"),
        ("a: [", "cannot read settings"),
        ("1: x", "wrong settings"),
    ],
)
def test_a_file_with_a_wrong_or_unknown_setting_is_refused_and_names_it(
    tmp_path: Path, text: str, named: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({}, written(tmp_path, text))
    assert named in str(caught.value)


def test_a_file_that_is_missing_or_no_text_is_a_settings_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.yaml", tmp_path, binary):
        with pytest.raises(SettingsError, match="cannot read settings from"):
            load_settings({}, path)
    with pytest.raises(SettingsError, match="cannot read settings from"):
        load_settings({"TRUNKLINE_CONF": str(tmp_path / "none.yaml")})


def test_a_refused_password_or_key_is_not_quoted(tmp_path: Path) -> None:
    path = written(tmp_path, "mqtt: {password: [canary]}\nmaster_key: {canary: 1}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings({}, path)
    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None


ALIASES = {
    "MQTT_BROKER": ("mq.example", "host", "mq.example"),
    "MQTT_PORT": ("8883", "port", 8883),
    "MQTT_TLS": ("true", "tls", True),
    "MQTT_CA_CERTS": ("ca.crt", "ca_certs", Path("ca.crt")),
    "MQTT_CERTFILE": ("c.crt", "certfile", Path("c.crt")),
    "MQTT_KEYFILE": ("c.key", "keyfile", Path("c.key")),
    "MQTT_USERNAME": ("ann", "username", "ann"),
    "MQTT_PASSWORD": ("pw", "password", SecretStr("pw")),
}


@pytest.mark.parametrize(("alias", "text", "field", "value"), [(a, *v) for a, v in ALIASES.items()])
def test_the_names_that_mqtt_users_know_are_aliases(
    empty: Path, alias: str, text: str, field: str, value: Any
) -> None:
    assert getattr(load_settings({alias: text}, empty).mqtt, field) == value


def test_file_then_alias_then_our_own_variable_the_later_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "mqtt: {host: from-file, port: 1}\nkafka: {topic: from-file}\n")
    assert load_settings({}, path).mqtt.host == "from-file"
    aliased = {"MQTT_BROKER": "from-alias"}
    assert load_settings(aliased, path).mqtt.host == "from-alias"
    found = load_settings({**aliased, "TRUNKLINE__MQTT__HOST": "from-ours"}, path)
    assert (found.mqtt.host, found.mqtt.port, found.kafka.topic) == ("from-ours", 1, "from-file")


def test_an_alias_without_a_value_says_nothing(empty: Path) -> None:
    assert load_settings({"MQTT_PORT": "", "MQTT_TLS": ""}, empty) == Settings()


@pytest.mark.requirement("OP-04")
def test_a_data_directory_that_is_empty_is_an_error_and_not_the_default(empty: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"data_dir: .*is empty.*unset it"):
        load_settings({"TRUNKLINE__DATA_DIR": ""}, empty)
    file = tmp_path / "settings.yaml"
    file.write_text("data_dir: ''\n")
    with pytest.raises(SettingsError, match=r"data_dir: .*is empty"):
        load_settings({}, file)
    assert load_settings({"TRUNKLINE__TLS_DIR": ""}, empty) == Settings()


def test_other_variables_are_none_of_our_business(empty: Path) -> None:
    assert load_settings({"TRUNKLINE": "x", "KAFKA__TOPIC": "x", "PATH": "x"}, empty) == Settings()


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    path = written(tmp_path, "kafka: {topic: named}")
    assert load_settings({"TRUNKLINE_CONF": str(path)}).kafka.topic == "named"


def test_settings_cannot_be_changed_and_secrets_do_not_show() -> None:
    chosen = Settings(mqtt=MqttSettings(password=SecretStr("canary")), master_key=SecretStr("canary"))
    assert "canary" not in repr(chosen) + str(chosen) + chosen.model_dump_json()
    with pytest.raises(ValidationError):
        chosen.data_dir = Path("x")  # type: ignore[misc]


def test_tables_state_and_keys_lie_below_the_data_directory_unless_told_otherwise(tmp_path: Path) -> None:
    chosen = Settings(data_dir=tmp_path)
    assert chosen.table_path("ledger") == str(tmp_path / "tables" / "ledger")
    assert chosen.state_path == tmp_path / "state"
    assert chosen.key_file == tmp_path / "keys" / "master.json"
    assert Settings().data_path.is_absolute()
    bucket = Settings(storage=StorageSettings(tables="s3a://b/t", state=Path("/local/state")))
    assert (bucket.table_path("ledger"), bucket.state_path) == ("s3a://b/t/ledger", Path("/local/state"))


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=12)
PATHS = WORDS.map(Path)
SECONDS = st.floats(min_value=0.001, max_value=1e6)
ANY_SETTINGS = st.builds(
    Settings,
    data_dir=PATHS,
    master_key_file=st.none() | PATHS,
    master_key=st.none() | WORDS.map(SecretStr),
    kafka=st.builds(
        KafkaSettings,
        bootstrap_servers=st.sampled_from(("kafka.example:9092", "a:1,[::1]:65535")),
        partitions=st.integers(1, 1024),
        delivery_timeout_s=SECONDS,
        heap_mb=st.integers(128, 9999),
    ),
    mqtt=st.builds(
        MqttSettings,
        host=st.sampled_from(("broker.example", "10.0.0.1", "::1", "my_broker")),
        tls=st.booleans(),
        ca_certs=st.none() | PATHS,
        username=st.none() | WORDS,
        password=st.none() | WORDS.map(SecretStr),
        topic_prefix=st.sampled_from(("python/mqtt/jobs", "a", "ä b/c")),
        backoff_base_s=SECONDS,
        bridge_inflight=st.integers(1, 65535),
        publisher_inflight=st.integers(1, 65535),
        bridge_read_ahead=st.integers(1, 65535),
    ),
    limits=st.builds(LimitSettings, payload_bytes=st.integers(1024, 2**40)),
    spark=st.builds(
        SparkSettings,
        master=st.sampled_from(("local", "local[*]", "local[4, 2]", "spark://a:7077,b:7077")),
        trigger_interval_ms=st.integers(0, 10**9),
    ),
    storage=st.builds(StorageSettings, tables=st.none() | WORDS, state=st.none() | PATHS),
)


@pytest.mark.requirement("OP-06")
@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("SPARK__DRIVER_MEMORY", "lots", r"spark\.driver_memory: .*'lots' is no size: .*such as 700m or 2g"),
        ("SPARK__DRIVER_MEMORY", "2048", r"spark\.driver_memory: .*a whole number and a unit"),
        ("SPARK__EXECUTOR_MEMORY", "1.5g", r"spark\.executor_memory: .*a whole number and a unit"),
        ("SPARK__EXECUTOR_MEMORY", "64m", r"spark\.executor_memory: .*Spark needs 512m or more"),
        ("SPARK__MASTER", "local[0]", r"spark\.master: .*local\[N\].*spark://HOST:PORT"),
        ("SPARK__MASTER", "yarn", r"spark\.master: "),
        ("SPARK__MASTER", "spark://host", r"spark\.master: .*spark://HOST:PORT"),
        ("KAFKA__BOOTSTRAP_SERVERS", "kafka.example", r"kafka\.bootstrap_servers: .*HOST:PORT"),
        ("KAFKA__BOOTSTRAP_SERVERS", "a:9092,,b:9092", r"kafka\.bootstrap_servers: .*HOST:PORT"),
        ("KAFKA__BOOTSTRAP_SERVERS", "a:70000", r"kafka\.bootstrap_servers: .*'a:70000'"),
        ("MQTT__HOST", "mqtt://broker", r"mqtt\.host: .*without scheme and port"),
        ("GATEWAY__HOST", "127.0.0.1:3200", r"gateway\.host: .*without scheme and port"),
        ("GATEWAY__URL", "hub.example", r"gateway\.url: .*http://HOST:PORT"),
        ("DASHBOARD__PORT", "3200", r"gateway\.port and dashboard\.port have the same port 3200"),
        ("MQTT__PORT", "19092", r"mqtt\.port and kafka\.bootstrap_servers have the same port 19092"),
    ],
)
def test_a_value_of_another_form_is_refused_with_the_form_that_is_accepted(
    setting: str, value: str, expected: str, empty: Path
) -> None:
    with pytest.raises(SettingsError, match=expected):
        load_settings({f"TRUNKLINE__{setting}": value}, empty)


@pytest.mark.requirement("OP-06")
def test_ports_may_be_the_same_where_the_addresses_differ_or_there_is_no_listener(empty: Path) -> None:
    load_settings({"TRUNKLINE__MQTT__PORT": "3200", "TRUNKLINE__MQTT__HOST": "broker.example"}, empty)
    load_settings({"TRUNKLINE__DASHBOARD__PORT": "0", "TRUNKLINE__AGENT_MCP__PORT": "0"}, empty)
    load_settings({"TRUNKLINE__DASHBOARD__PORT": "3200", "TRUNKLINE__DASHBOARD__HOST": "10.0.0.7"}, empty)


@given(ANY_SETTINGS)
@settings(max_examples=80, deadline=None)
def test_a_child_process_reads_the_same_settings_from_its_environment(chosen: Settings) -> None:
    variables = settings_environment(chosen)
    assert load_settings(variables, Path("/dev/null")) == chosen
    assert all("\x00" not in name + value for name, value in variables.items())


def test_only_what_differs_from_the_defaults_is_put_into_the_environment() -> None:
    assert settings_environment(Settings()) == {}
    chosen = Settings(kafka=KafkaSettings(topic="t"), mqtt=MqttSettings(tls=True))
    assert settings_environment(chosen) == {"TRUNKLINE__KAFKA__TOPIC": "t", "TRUNKLINE__MQTT__TLS": "True"}


@pytest.mark.parametrize(
    "address",
    [
        "agents.example",
        "https://[agents",
        "ftp://agents.example",
        "http://agents.example:99999",
        "https://:3100",
    ],
)
def test_where_agents_find_the_gateway_is_an_address_or_refused_by_its_name(address: str, empty: Path) -> None:
    with pytest.raises(SettingsError, match=r"agent_mcp\.url"):
        load_settings({"TRUNKLINE__AGENT_MCP__URL": address}, empty)


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    found = Settings(gateway=GatewaySettings(host="::1"), agent_mcp=AgentMcpSettings(host="::1"))
    assert (found.gateway_url, found.mcp_server_url) == ("http://[::1]:3200", "http://[::1]:3100")
