"""The JavaScript library: its own tests, its package, and agents and jobs at a real gateway and bridge."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.plumbing.tls_keys.tls_authority import new_authority, new_leaf
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import BrokerProcess
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.connectors.doors.mqtt_bridge.agents.mail_run import MailRun
from tests.hostile_broker import HostileBroker, publish
from tests.own_settings import own_settings
from tests.programs import required_program, run_program, start_program
from trunkline_agent.errors import OutboxBusy
from trunkline_agent.outbox.outbox import JobOutbox
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.strict_json import canonical, decode_slowly
from trunkline_agent.wire.unsafe_text import PATTERNS, unsafe_pattern

PACKAGE = PROJECT_ROOT / "connectors" / "agent_sdk" / "js"
PROGRAMS = Path(__file__).parent / "javascript"
NPM_S = 180
# Packages of npm for the tests, in the versions that the tests were written with.
FROM_NPM = ("mqtt@5.16.0", "typescript@5.9.3", "@types/node@20.19.0")
QUIET = ("--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock")


@pytest.fixture(scope="session")
def node() -> str:
    """Node.js."""
    return required_program("nodejs", "node")


@pytest.fixture(scope="session")
def npm(node: str) -> str:
    """The package manager of Node.js, which Debian has apart from it."""
    return required_program("npm", "npm")


def npm_run(npm: str, folder: Path, *arguments: str) -> str:
    """Run npm in a folder; returns its output."""
    done = run_program([npm, *arguments], NPM_S, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tarball(npm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as `npm pack` makes it."""
    folder = tmp_path_factory.mktemp("packed")
    (made,) = json.loads(npm_run(npm, PACKAGE, "pack", "--json", "--pack-destination", str(folder)))
    return folder / made["filename"]


def project(folder: Path, npm: str, tarball: Path, *packages: str) -> Path:
    """A new project with the package, and these packages from npm."""
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    offline = () if packages else ("--offline",)
    npm_run(npm, folder, "install", *QUIET, "--prefer-offline", *offline, str(tarball), *packages)
    for program in PROGRAMS.iterdir():
        shutil.copy(program, folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, npm: str, tarball: Path) -> Path:
    """A project that has the package and no other."""
    return project(tmp_path_factory.mktemp("bare") / "project", npm, tarball)


@pytest.fixture(scope="module")
def equipped(tmp_path_factory: pytest.TempPathFactory, npm: str, tarball: Path) -> Path:
    """A project that has the package, `mqtt` and TypeScript."""
    return project(tmp_path_factory.mktemp("equipped") / "project", npm, tarball, *FROM_NPM)


@pytest.fixture(scope="module")
def run(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MailRun]:
    """Gateway and bridge over a topic of their own."""
    folder = tmp_path_factory.mktemp("javascript")
    settings = own_settings(kafka_broker, mosquitto_broker, folder)
    found = MailRun(settings, load_keyring(settings), folder)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def tokens(run: MailRun) -> dict[str, str]:
    """The variables of the programs: the gateway's address and the tokens of its principals."""
    roles = {"ann": "worker", "bo": "worker", "delegator": "delegator"}
    made = {f"{name.upper()}_TOKEN": add_principal(run.operator, name, role) for name, role in roles.items()}
    return {"HUB_URL": run.gateway.url, **made}


def node_tests(node: str, folder: Path, *files: str, **variables: str) -> None:
    """Run files of tests with Node's own runner, and fail with its report."""
    command = [node, "--test", "--test-reporter=spec", *files]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    done = run_program(command, 120, folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def evaluated(node: str, program: str, given: Any) -> Any:
    """Run a program that finds JSON in `given` and prints JSON; `lib` is the library's folder."""
    done = run_program(program_command(node, program), 60, input=json.dumps(given))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def program_command(node: str, program: str) -> list[str]:
    """The command of `evaluated`."""
    lib = f"const lib = {json.dumps((PACKAGE / 'lib').as_uri())};"
    read = "const given = JSON.parse((await import('node:fs')).readFileSync(0, 'utf8'));"
    return [node, "--input-type=module", "--eval", f"{lib}\n{read}\n{program}"]


@pytest.mark.requirement("AG-60")
@pytest.mark.requirement("AG-68")
@pytest.mark.requirement("AG-69")
@pytest.mark.requirement("AG-92")
@pytest.mark.requirement("AG-93")
@pytest.mark.requirement("AG-94")
@pytest.mark.requirement("AG-74")
@pytest.mark.requirement("AG-95")
@pytest.mark.requirement("AG-99")
@pytest.mark.requirement("LM-20")
@pytest.mark.requirement("LM-21")
def test_the_library_passes_its_own_tests_with_nothing_installed(node: str, tmp_path: Path) -> None:
    files = sorted(str(path) for path in (PACKAGE / "test").glob("*.test.js"))
    assert len(files) >= 6
    node_tests(node, tmp_path, *files)


def random_value(source: random.Random, depth: int = 0) -> Any:
    """Random JSON with the numbers and texts that implementations differ in."""
    kind = source.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return source.choice([None, True, False])
    if kind == 1:
        return source.choice([1, -1]) * source.getrandbits(source.choice([1, 8, 53, 54, 63]))
    if kind in (2, 3):
        number = struct.unpack(">d", source.randbytes(8))[0]
        decimal = source.randint(1, 10**17) * 10.0 ** source.randint(-30, 30)
        return source.choice(
            [decimal, float(source.randint(-(2**60), 2**60)), number if abs(number) < 1e308 else 0.0]
        )
    if kind in (4, 5):
        points = (
            0x00,
            0x22,
            0x5C,
            0x7F,
            0x41,
            0xE9,
            0x2028,
            0xD7FF,
            0xE000,
            0xFFFF,
            0x10000,
            0x1F600,
            0x10FFFF,
        )
        return "".join(chr(source.choice(points)) for _ in range(source.randrange(6)))
    items = [random_value(source, depth + 1) for _ in range(source.randrange(5))]
    if kind == 6:
        return items
    return {
        "".join(chr(source.choice((0x61, 0xE000, 0xFFFF, 0x1F600))) for _ in range(3)): item for item in items
    }


@pytest.mark.requirement("AG-61")
def test_random_documents_have_the_same_canonical_form_in_python_and_javascript(node: str) -> None:
    source = random.Random(30)
    documents = [random_value(source) for _ in range(1500)]
    expected = [canonical(document).decode() for document in documents]
    written = [
        json.dumps(document, indent=source.choice([None, 1]), ensure_ascii=source.random() < 0.5)
        for document in documents
    ]
    assert [canonical(decode_slowly(text.encode())).decode() for text in written] == expected
    program = """
        const { canonical, decode } = await import(`${lib}/canonical_json.js`);
        console.log(JSON.stringify(given.map((text) => canonical(decode(text, { exact: true })))));"""
    assert evaluated(node, program, written) == expected


@pytest.mark.requirement("AG-61")
def test_unsafe_texts_are_recognised_as_in_python(node: str) -> None:
    texts = [text for pattern in PATTERNS for text in (*pattern.unsafe, *pattern.safe)]
    texts += [
        "größer 3/10",
        "é/home/x",
        "étoken=x",
        "p\u00e4ssword: x",
        "see\u00a0/etc/passwd",
        "TOKEN\u2003=\u2003x",
    ]
    program = """
        const { unsafePattern } = await import(`${lib}/unsafe_text.js`);
        console.log(JSON.stringify(given.map(unsafePattern)));"""
    assert evaluated(node, program, texts) == [unsafe_pattern(text) for text in texts]


@pytest.mark.requirement("AG-62")
def test_python_and_javascript_share_an_outbox_and_its_lock(node: str, tmp_path: Path) -> None:
    job = "0a1b2c3d"
    with JobOutbox(tmp_path, job, 1) as outbox:
        outbox.add("started", lambda seq: b"python")
    program = """
        const { JobOutbox } = await import(`${lib}/outbox.js`);
        const outbox = await JobOutbox.open(given.folder, given.job, 5);
        const [first] = outbox.pending;
        await outbox.confirm(first);
        await outbox.add("completed", () => Buffer.from("größer"));
        await outbox.close();
        console.log(JSON.stringify(first));"""
    given = {"folder": str(tmp_path), "job": job}
    assert evaluated(node, program, given) == {"seq": 1, "payload": "python", "event": "started"}
    with JobOutbox(tmp_path, job, 1) as outbox:
        (pending,) = outbox.pending
        assert (pending.seq, pending.wire_bytes.decode(), outbox.ended_seq) == (2, "größer", 2)
        busy = """
            const { JobOutbox } = await import(`${lib}/outbox.js`);
            const error = await JobOutbox.open(given.folder, given.job, 0.3).catch((found) => found);
            console.log(JSON.stringify(error.name));"""
        assert evaluated(node, busy, given) == "OutboxBusy"
    held = """
        const { JobOutbox } = await import(`${lib}/outbox.js`);
        await JobOutbox.open(given.folder, given.job, 5);
        console.log(JSON.stringify("held"));
        setInterval(() => {}, 1000);"""
    holder = start_program(program_command(node, held), stdin=subprocess.PIPE)
    try:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(json.dumps(given))
        holder.stdin.close()
        assert json.loads(holder.stdout.readline()) == "held"
        with pytest.raises(OutboxBusy), JobOutbox(tmp_path, job, 0.2):
            pass
    finally:
        holder.kill()
        holder.wait(20)
        holder.stdout.close()
        holder.stderr.close()
    # The lock of a process that was killed is gone.
    with JobOutbox(tmp_path, job, 5) as outbox:
        assert outbox.last_seq == 2


@pytest.mark.requirement("AG-66")
def test_the_package_has_types_that_a_strict_program_passes(node: str, equipped: Path) -> None:
    lib = ("--lib", "es2022,esnext.disposable", "--types", "node")
    options = ("--noEmit", "--strict", "--target", "es2022", "--module", "nodenext", *lib)
    compiler = equipped / "node_modules" / "typescript" / "bin" / "tsc"
    done = run_program([node, compiler, *options, "typed.ts"], 120, equipped)
    assert done.returncode == 0, done.stdout
    names = "import * as all from 'trunkline-agent'; console.log(JSON.stringify(Object.keys(all)))"
    shown = run_program([node, "--input-type=module", "--eval", names], 60, equipped)
    types = (PACKAGE / "trunkline_agent.d.ts").read_text(encoding="utf-8")
    declared = re.findall(r"^export (?:declare )?(?:class|function|const) (\w+)", types, re.MULTILINE)
    assert sorted(json.loads(shown.stdout)) == sorted(declared)


@pytest.mark.requirement("AG-60")
def test_the_tarball_has_the_library_alone_and_needs_no_other_package(tarball: Path, bare: Path) -> None:
    installed = bare / "node_modules"
    assert [path.name for path in installed.iterdir() if not path.name.startswith(".")] == ["trunkline-agent"]
    files = {
        path.relative_to(installed / "trunkline-agent") for path in (installed / "trunkline-agent").rglob("*.*")
    }
    modules = {path.relative_to(PACKAGE) for path in PACKAGE.glob("lib/*.*")}
    named = {Path(name) for name in ("package.json", "README.md", "trunkline_agent.js", "trunkline_agent.d.ts")}
    assert files == modules | named
    assert tarball.stat().st_size < 100_000
    imported = {
        name
        for path in (PACKAGE / file for file in modules | {Path("trunkline_agent.js")} if file.suffix == ".js")
        for name in re.findall(r"(?:from|import\() ?\"([^\"]+)\"", path.read_text(encoding="utf-8"))
    }
    assert {name for name in imported if not name.startswith(("node:", "./"))} == {"mqtt"}


@pytest.mark.requirement("JE-32")
def test_a_job_event_is_sent_again_when_its_receipt_follows_a_packet_that_cannot_be_read(
    node: str, equipped: Path
) -> None:
    bad = iter([publish(b"x", b"bad", 7, properties=b"\x02\x7f\x00")])

    def answer(topic: bytes, payload: bytes) -> bytes:
        receipt = {"ce_id": content_id(topic, payload), "seq": 1, "verdict": "accepted"}
        said = canonical({"kind": "receipt", "schema_version": 1, **receipt})
        return next(bad, b"") + publish(topic.replace(b"events", b"receipts"), said, 8)

    program = """
        import { Job } from "trunkline-agent";
        const mqtt = { port: Number(process.argv[1]), receiptS: 60 };
        const job = new Job("0a1b2c3d", "s".repeat(43), { mqtt, stateDir: "malformed-state" });
        const { seq, verdict } = await job.started();
        await job.close();
        console.log(JSON.stringify({ seq, verdict }));
    """
    broker = HostileBroker([], answer=answer)
    try:
        command = [node, "--input-type=module", "--eval", program, str(broker.port)]
        done = run_program(command, 30, equipped)
    finally:
        broker.close()
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout), broker.connects) == ({"seq": 1, "verdict": "accepted"}, 2)


@pytest.mark.requirement("AG-67")
def test_a_gateway_with_tls_is_verified_against_the_authority_of_the_credentials(
    node: str, bare: Path, tmp_path: Path
) -> None:
    authority, other = new_authority(), new_authority()
    server = new_leaf(authority, "gateway", ["127.0.0.1"])
    (tmp_path / "ca.crt").write_bytes(authority.certificate_pem)
    (tmp_path / "other.crt").write_bytes(other.certificate_pem)
    (tmp_path / "server.crt").write_bytes(server.certificate_pem)
    (tmp_path / "server.key").write_bytes(server.key_pem)
    node_tests(node, bare, "tls.test.mjs", TLS_FOLDER=str(tmp_path))


@pytest.mark.requirement("AG-63")
def test_agents_in_javascript_exchange_messages_at_a_real_gateway(
    node: str, bare: Path, tokens: dict[str, str]
) -> None:
    node_tests(node, bare, "mailbox.test.mjs", **tokens)


@pytest.mark.requirement("AG-64")
def test_jobs_in_javascript_run_to_their_end_over_http(node: str, bare: Path, tokens: dict[str, str]) -> None:
    node_tests(node, bare, "jobs.test.mjs", **tokens)


@pytest.mark.requirement("AG-65")
def test_jobs_in_javascript_run_to_their_end_over_mqtt(
    node: str, equipped: Path, run: MailRun, tokens: dict[str, str]
) -> None:
    mqtt = run.settings.mqtt
    more = {"MQTT_PORT": str(mqtt.port), "MQTT_TOPICS": mqtt.topic_prefix}
    node_tests(node, equipped, "jobs.test.mjs", **tokens, **more)
