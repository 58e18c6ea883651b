"""Fixtures that several test folders share: real brokers on free ports, and settings that point at them.

`kafka_broker` and `mosquitto_broker` live for the session; `backbone_settings` gives each test a topic, an
MQTT prefix and a data directory of its own. `start_bridge` runs the bridge, `read_topic` reads the log.
"""

from __future__ import annotations

import compileall
import fcntl
import functools
import gc
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import hypothesis
import pytest
import structlog
from _pytest.assertion import assertstate_key
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    get_cache_dir,
    try_makedirs,
)

from connectors.programs.local_stack.part_plan import DELTA_CONF
from schemas.keys.sealing import Keyring, ensure_keyring
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import BrokerProcess, ProgramProcess, make_kafka, make_mosquitto
from tests.class_archives import QUICK_JVM, use_archives
from tests.forked_programs import close_server
from tests.own_settings import own_settings
from tests.s3_server import ObjectStore, s3_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

os.environ["JDK_JAVA_OPTIONS"] = QUICK_JVM
use_archives()

# A program that may not keep its bytecode compiles all our modules anew, a quarter of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A client reads all authorities that the machine trusts, 30 ms of processor time, also one that speaks no TLS;
# and a test has some ten clients.
for library in (httpx, httpx2):
    library._transports.default.create_ssl_context = functools.cache(library.create_ssl_context)

# Spark leaves the processor to others, who here are the tests of three other workers: it would get none.
os.environ.setdefault("TRUNKLINE__SPARK__NICENESS", "0")

# Without a file, structlog writes to what `sys.stdout` is at that moment: a thread of one test's gateway wrote
# into the output of a command that another test ran within this process.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))

# An example may meet a moment in which two other workers have both cores.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# A shell that starts the tests in the background lets them ignore SIGINT, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Make the class archives and the bytecode that are missing before a run of all tests; the workers start
    after this.
    """
    if os.environ.get("TRUNKLINE_TESTS") == "all" and not hasattr(session.config, "workerinput"):
        with subprocess.Popen([sys.executable, "-m", "tests.class_archives"], cwd=PROJECT_ROOT):
            write_bytecode(session.config)


def write_bytecode(config: pytest.Config) -> None:
    """Compile our modules, and the tests as pytest does. In a new clone each worker would, all at once."""
    for folder in ("connectors", "jobs", "notebooks", "schemas"):
        compileall.compile_dir(PROJECT_ROOT / folder, quiet=2)
    state = config.stash[assertstate_key]
    for path in PROJECT_ROOT.joinpath("tests").rglob("*.py"):
        if not path.name.startswith("test_") and path.name != "conftest.py":
            compileall.compile_file(path, quiet=2)
            continue
        file = get_cache_dir(path) / (path.stem + PYC_TAIL)
        if try_makedirs(file.parent) and _read_pyc(path, file) is None:
            digest, code = _rewrite_test(path, config)
            _write_pyc(state, code, digest, file)


@pytest.hookimpl
def pytest_sessionfinish() -> None:
    """End the fork server of this process, if a test has started one, and let Python collect all at its end."""
    close_server()
    gc.unfreeze()


# Fixtures that start something beside Python, and the marker of the tests that use them.
NEEDS = {
    "kafka_broker": "kafka",
    "mosquitto_broker": "mosquitto",
    "spark": "spark",
    "chromium": "browser",
    "node": "node",
    "stack_settings": "stack",
    "demo_run": "stack",
}


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test for what its fixtures start; a test that starts it by itself has the marker in its file."""
    for fixture in NEEDS.keys() & set(getattr(item, "fixturenames", ())):
        item.add_marker(NEEDS[fixture])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without Python's garbage collector.

    The modules and the 5,000 tests stay until the end, so the collector need not look at them later, either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


QUICK_EXAMPLES = 10
NOT_QUICK = "trunkline/files_without_quick_tests"
"""The entry of pytest's cache with the files from which `check` takes no test, and their digests."""
_left_out: set[Path] = set()


def is_quick() -> bool:
    """Tell whether this run is that of `./trunkline check`."""
    return os.environ.get("TRUNKLINE_TESTS") == "quick"


@functools.cache
def shared_digest() -> str:
    """Return a digest of all modules that tests share. A fixture of theirs can give a test its marker."""
    shared = (
        path for path in PROJECT_ROOT.joinpath("tests").rglob("*.py") if not path.name.startswith("test_")
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(shared))).hexdigest()


def file_digest(path: Path, config: pytest.Config) -> str:
    """Return a digest of all that decides which tests of a file `-m` chooses."""
    rest = shared_digest() + config.option.markexpr
    return hashlib.sha256(path.read_bytes() + rest.encode()).hexdigest()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let `check` import no file again from which it took no test: two of five."""
    if (
        not is_quick()
        or collection_path.suffix != ".py"
        or not config.pluginmanager.has_plugin("cacheprovider")
    ):
        return None
    known = config.cache.get(NOT_QUICK, {}).get(str(collection_path.relative_to(PROJECT_ROOT)))
    return True if known is not None and known == file_digest(collection_path, config) else None


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Note the files of the tests that the markers leave out."""
    _left_out.update(item.path for item in items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember the files from which `check` takes no test, unless it was asked for a part of a file."""
    config = session.config
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    is_part = config.option.keyword or any("::" in word for word in config.args)
    if not (is_quick() and is_first and config.pluginmanager.has_plugin("cacheprovider")) or is_part:
        return
    without = _left_out - {item.path for item in session.items}
    if without:
        found = {str(path.relative_to(PROJECT_ROOT)): file_digest(path, config) for path in without}
        config.cache.set(NOT_QUICK, config.cache.get(NOT_QUICK, {}) | found)


# The files that take longest, the longest first.
LONGEST = ("test_demo.py", "test_prove_seeds.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, and shorten the random tests if `check` asks for it.

    At the end of a run no worker should have one left while the others have nothing to do. Next come the tests
    of the worker that has Spark, then the files with long time limits. The last are undisturbed tests: all
    workers wait for these.
    """
    limits: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0]) if marker is not None and marker.args else 0.0
        limits[item.path] = max(limit, limits.get(item.path, 0.0))

    undisturbed = {item.path for item in items if item.get_closest_marker("undisturbed")}

    def order(path: Path) -> tuple[bool, bool, bool, float]:
        return path in undisturbed, path.name not in LONGEST, not takes_spark(path), -limits[path]

    items.sort(key=lambda item: order(item.path))
    if is_quick():
        for item in items:
            shorten(getattr(item, "obj", None))


def shorten(test: Any) -> None:
    """Let a test that draws random examples draw a tenth of them. `./trunkline test` draws all."""
    drawn = getattr(test, "_hypothesis_internal_use_settings", None)
    if drawn is not None and drawn.max_examples > QUICK_EXAMPLES:
        examples = max(QUICK_EXAMPLES, drawn.max_examples // 10)
        getattr(test, "__func__", test)._hypothesis_internal_use_settings = hypothesis.settings(
            drawn, max_examples=examples
        )


@functools.cache
def worker_locks() -> tuple[int, int]:
    """Return two files that all workers of a checkout can lock: the gate to the other, so that nobody starves,
    and the one that a test holds.
    """
    gate, running = (PROJECT_ROOT / name for name in ("pyproject.toml", "tests/conftest.py"))
    return os.open(gate, os.O_RDONLY), os.open(running, os.O_RDONLY)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let no other worker run a test beside an undisturbed one; the time that it waits is not the test's."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    gate, running = worker_locks()
    fcntl.flock(gate, fcntl.LOCK_EX)
    fcntl.flock(running, fcntl.LOCK_EX if item.get_closest_marker("undisturbed") else fcntl.LOCK_SH)
    fcntl.flock(gate, fcntl.LOCK_UN)
    try:
        return (yield)
    finally:
        fcntl.flock(running, fcntl.LOCK_UN)


@functools.cache
def takes_spark(path: Path) -> bool:
    """Return whether tests of this file take the session's Spark, by their arguments."""
    return re.search(r"\b(spark: SparkSession|drain: Callable)\b", path.read_text()) is not None


@functools.cache
def reads_source(path: Path) -> bool:
    """Return whether tests of this file look at the files of the project."""
    return "from tests.source_files import" in path.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files that share something dear to one worker.

    A new Spark is slow for half a minute. The tests of the source's form parse all files.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedScopes(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            path = config.rootpath / file
            return "spark" if takes_spark(path) else "source" if reads_source(path) else file

    return SharedScopes(config, log)


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A running Kafka for the whole session. A test that stops it starts it again."""
    broker = make_kafka(tmp_path_factory.mktemp("kafka"))
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture(scope="session")
def mosquitto_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A running Mosquitto for the whole session. A test that stops it starts it again."""
    broker = make_mosquitto(tmp_path_factory.mktemp("mosquitto"))
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Spark session as the local stack configures it, and with Delta's extension for tests in which Spark
    reads a table by it. The jobs' own session, as in test_run_streams.py, does without.
    """
    from tests.spark_session import start_session

    session = start_session(tmp_path_factory.mktemp("spark"), conf=DELTA_CONF)
    yield session
    session.stop()


@pytest.fixture
def backbone_settings(kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path: Path) -> Settings:
    """Settings with a topic, an MQTT prefix, a data directory and a keyring of their own."""
    return own_settings(kafka_broker, mosquitto_broker, tmp_path)


@pytest.fixture
def keyring(backbone_settings: Settings) -> Keyring:
    """The keyring of `backbone_settings`."""
    return ensure_keyring(backbone_settings)


@pytest.fixture(scope="session")
def object_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A server of object stores."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(object_stores: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """An empty object store, which all programs of the test find."""
    for name, value in object_stores.environment.items():
        monkeypatch.setenv(name, value)
    return object_stores.with_bucket()


@pytest.fixture
def start_bridge(backbone_settings: Settings, tmp_path: Path) -> Iterator[Callable[..., ProgramProcess]]:
    """Starts the MQTT bridge as a process and waits until it is subscribed; all end with the test."""
    started: list[ProgramProcess] = []

    def start(settings: Settings | None = None, *, wait: bool = True) -> ProgramProcess:
        bridge = ProgramProcess(
            "connectors.doors.mqtt_bridge", settings or backbone_settings, tmp_path, "bridge"
        )
        started.append(bridge)
        if wait:
            bridge.wait_ready()
        return bridge

    yield start
    for bridge in started:
        bridge.kill()


_GIVEN = (b"control/topology", b"control/macs-", b"agent/")


@pytest.fixture
def read_topic(backbone_settings: Settings) -> Callable[..., list[Any]]:
    """Reads the whole topic, waiting until it holds `at_least` records beside the first ones and the
    agents that each gateway declares."""

    def read(at_least: int = 0, timeout_s: float = 30.0) -> list[Any]:
        found: list[Any] = []
        deadline = time.monotonic() + timeout_s
        with topic_reader(backbone_settings.kafka) as consumer:
            while True:
                for batch in consumer.poll(timeout_ms=200).values():
                    found += [r for r in batch if not (r.key or b"").startswith(_GIVEN)]
                ends = consumer.end_offsets(sorted(consumer.assignment()))
                if len(found) >= at_least and all(consumer.position(p) >= end for p, end in ends.items()):
                    return found
                if time.monotonic() > deadline:
                    pytest.fail(f"{len(found)} of {at_least} records after {timeout_s} s")

    return read
