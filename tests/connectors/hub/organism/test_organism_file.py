"""The organism file: what it may say, what is refused with which words, and that handlers are asked apart."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from connectors.hub.organism.declared_files import describe_handlers
from connectors.hub.organism.organism_file import OrganismError, load_organism
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import wait_until
from tests.connectors.doors.out_of_band.sample_handlers import MODULE, NAMESPACE

pytestmark = pytest.mark.requirement("XP-09")

_WHOLE = f"""\
listeners:
  - name: adder
    capability: adds two numbers
    root_tag: sum
    namespace: {NAMESPACE}
    handler: {MODULE}:add
    tools: [book]
    concurrency: 3
    per_minute: 60
    timeout_s: 2.5
  - name: book
    handler: {MODULE}:note
  - name: ann
    type: human
agents:
  - name: researcher
    type: llm
    capability: looks things up
    root_tag: research
    namespace: urn:example:research:1
    model: small
    system_prompt: Be brief.
    client: my_clients:scripted
    visible_tools: [adder]
    tokens_per_minute: 1000
meta:
  allow_list_capabilities: all
  allow_schema_requests: admin
"""


@pytest.fixture
def organism(tmp_path: Path) -> Path:
    return tmp_path / "organism.yaml"


def refused(organism: Path, text: str) -> str:
    organism.write_text(textwrap.dedent(text))
    with pytest.raises(OrganismError) as raised:
        load_organism(organism)
    assert str(raised.value).startswith(str(organism))
    return str(raised.value)


def test_listeners_agents_and_meta_become_listeners_of_the_log(organism: Path):
    organism.write_text(_WHOLE)
    found = {one.name: one for one in load_organism(organism).listeners}
    assert list(found) == ["adder", "book", "ann", "researcher", "meta"]
    adder, book, ann, researcher, meta = found.values()
    assert (adder.type, adder.root_tag, adder.namespace, adder.handler) == (
        "handler",
        "sum",
        NAMESPACE,
        f"{MODULE}:add",
    )
    assert (adder.visible_tools, adder.concurrency, adder.per_minute, adder.timeout_ms) == (
        ["book"],
        3,
        60,
        2500,
    )
    assert 'name="second"' in (adder.xsd or "")
    assert (adder.example or "").startswith("<sum ")
    # The class gives the values that the file leaves out.
    assert (book.root_tag, book.namespace, book.visible_tools) == ("total", NAMESPACE, None)
    assert (ann.type, ann.root_tag, ann.handler, ann.xsd) == ("human", "ann", None, None)
    assert (researcher.type, researcher.root_tag, researcher.visible_tools) == ("llm", "research", ["adder"])
    assert json.loads(researcher.options or "") == {
        "client": "my_clients:scripted",
        "model": "small",
        "system_prompt": "Be brief.",
    }
    assert (meta.type, meta.root_tag) == ("meta", "meta")
    assert json.loads(meta.options or "") == {
        "allow_list_capabilities": "all",
        "allow_schema_requests": "admin",
    }


@pytest.mark.long
def test_the_sample_of_the_checkout_can_be_loaded():
    names = [one.name for one in load_organism(PROJECT_ROOT / "conf" / "organism.yaml").listeners]
    assert "console" in names


@pytest.mark.long
def test_the_digest_is_another_when_the_file_or_a_handlers_class_is(
    organism: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = tmp_path / "own_handlers_of_this_test.py"
    text = (
        "from dataclasses import dataclass\n"
        "from connectors.doors.xml_pump.handlers import handles\n"
        "from connectors.plumbing.xml_payloads.payload_types import payload\n"
        "@payload('ask', namespace='urn:example:1')\n@dataclass\nclass Ask:\n    text: str\n"
        "@handles(Ask)\nasync def f(message): pass\n"
    )
    module.write_text(text)
    organism.write_text("listeners: [{name: a, handler: 'own_handlers_of_this_test:f'}]\n")
    first = load_organism(organism).digest
    assert load_organism(organism).digest == first
    module.write_text(text.replace("text: str", "text: str\n    more: int"))
    second = load_organism(organism).digest
    organism.write_text("listeners: [{name: a, handler: 'own_handlers_of_this_test:f', capability: x}]\n")
    assert len({first, second, load_organism(organism).digest}) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("listeners: [", "is not valid YAML"),
        ("- a", "dictionary"),
        ("handlers: []", "handlers: Extra inputs"),
        ("listeners: [{name: a, handlr: 'b:c'}]", "listeners, a, handlr"),
        ("listeners: [{handler: 'b:c'}]", "listeners, 1, name: Field required"),
        ("listeners: [{name: a}]", "listeners, a: handler: a listener needs one"),
        ("listeners: [{name: a, type: human, handler: 'b:c'}]", "a human has none"),
        ("listeners: [{name: a b, type: human}]", "listeners, a b, name: not a name"),
        ("listeners: [{name: operator, type: human}]", "operator is a name that the programs use"),
        ("listeners: [{name: a, type: llm}]", "listeners, a, type"),
        ("listeners: [{name: a, handler: 'os.system(1)'}]", "listeners, a, handler"),
        ("listeners: [{name: a, handler: 'b:c', concurrency: 0}]", "listeners, a, concurrency"),
        ("listeners: [{name: a, handler: 'b:c', timeout_s: .nan}]", "listeners, a, timeout_s"),
        ("listeners: [{name: a, handler: 'b:c', concurrency: '3'}]", "listeners, a, concurrency"),
        ("listeners: [{name: a, type: human}, {name: a, type: human}]", "the name a is used twice"),
        ("listeners: [{name: meta, type: human}]\nmeta: {}", "the name meta is used twice"),
        ("listeners: []\nlisteners: []", "'listeners' is written twice"),
        ("listeners: [{name: &a b, type: human}, {name: *a, type: human}]", "an alias"),
        ("agents: [{name: a}]", "agents, a, root_tag: Field required"),
        ("meta: {allow_schema_requests: everybody}", "meta, allow_schema_requests"),
        ("listeners: [{name: 1a, type: human}]", "root_tag"),
        (
            "listeners: [{name: a, handler: 'no_such_module:f'}]",
            "listener a: handler no_such_module:f: cannot import",
        ),
        (f"listeners: [{{name: a, handler: '{MODULE}:gone'}}]", "has no gone"),
        (
            f"listeners: [{{name: a, handler: '{MODULE}:add', root_tag: add}}]",
            "root_tag is 'add', but the class",
        ),
        (f"listeners: [{{name: a, handler: '{MODULE}:add', namespace: 'urn:x'}}]", "namespace is 'urn:x', but"),
        ("!!python/object/apply:os.system ['false']", "is not valid YAML"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_its_place(organism: Path, text: str, said: str):
    assert said in refused(organism, text)


@pytest.mark.long
@pytest.mark.requirement("XB-02")
def test_the_description_of_a_listener_reaches_the_log_and_no_description_changes_nothing(organism: Path):
    entry = f"listeners: [{{name: a, handler: '{MODULE}:add'"
    organism.write_text(f"{entry}, description: Adds two numbers.}}]\n")
    assert load_organism(organism).listeners[0].options == '{"description":"Adds two numbers."}'
    organism.write_text(f"{entry}}}]\n")
    assert load_organism(organism).listeners[0].options is None


def test_a_file_that_cannot_be_read_is_said_so(organism: Path):
    with pytest.raises(OrganismError, match="cannot be read: No such file"):
        load_organism(organism)
    organism.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(OrganismError, match="is larger than"):
        load_organism(organism)
    organism.write_bytes(b"\xff\xfe")
    with pytest.raises(OrganismError, match="is not valid YAML"):
        load_organism(organism)


def test_a_handlers_module_is_imported_in_a_process_of_its_own_that_knows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRUNKLINE__MASTER_KEY", "top secret")
    monkeypatch.setenv("TRUNKLINE_TOKEN", "top secret")
    seen = tmp_path / "seen"
    (tmp_path / "nosy_module_of_this_test.py").write_text(
        "import os, pathlib\nprint('noise')\n"
        f"pathlib.Path({str(seen)!r}).write_text(repr((os.getpid(), os.environ)))\n"
    )
    (tmp_path / "dying_module_of_this_test.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "leaving_module_of_this_test.py").write_text("raise SystemExit('bye')\n")
    found = describe_handlers(["nosy_module_of_this_test:f", "leaving_module_of_this_test:f"])
    assert "has no f" in (found["nosy_module_of_this_test:f"].fault or "")
    assert "bye" in (found["leaving_module_of_this_test:f"].fault or "")
    assert "top secret" not in seen.read_text()
    assert not seen.read_text().startswith(f"({os.getpid()},")
    assert not [name for name in sys.modules if name.endswith("_module_of_this_test")]
    died = describe_handlers(["dying_module_of_this_test:f"])["dying_module_of_this_test:f"]
    assert "exit code 3" in (died.fault or "")


@pytest.mark.long
def test_a_module_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pid = tmp_path / "pid"
    (tmp_path / "slow_module_of_this_test.py").write_text(
        "import signal, subprocess, sys\n"
        "wait = [sys.executable, '-c', 'import signal; signal.alarm(40); signal.pause()']\n"
        "subprocess.Popen(wait)\n"
        # It leaves the group, and holds the pipes.
        f"left = subprocess.Popen(wait, start_new_session=True)\nopen({str(pid)!r}, 'w').write(str(left.pid))\n"
        "signal.pause()\n"
    )
    begun = time.monotonic()
    try:
        found = describe_handlers(["slow_module_of_this_test:f"], timeout_s=3)
        assert time.monotonic() - begun < 20
        assert "not imported within 3 s" in (found["slow_module_of_this_test:f"].fault or "")
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_what_a_module_has_started_ends_with_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    end = tmp_path / "end"
    os.mkfifo(end)
    code = f"import signal; signal.alarm(40); f = open({str(end)!r}, 'w'); signal.pause()"
    (tmp_path / "starting_module_of_this_test.py").write_text(
        "import subprocess, sys\n"
        f"null, command = subprocess.DEVNULL, [sys.executable, '-c', {code!r}]\n"
        "subprocess.Popen(command, stdout=null, stderr=null)\n"
        f"open({str(end)!r}).close()\n"  # once it runs
    )
    found = describe_handlers(["starting_module_of_this_test:f"])
    assert "has no f" in (found["starting_module_of_this_test:f"].fault or "")
    # It is at its end as soon as nobody can write to it.
    with os.fdopen(os.open(end, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        wait_until(lambda: stream.read() == b"", what="the started process ends")


@pytest.mark.requirement("XP-06")
def test_the_examples_of_the_page_can_be_loaded(
    organism: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    page = (PROJECT_ROOT / "docs" / "how-to" / "use_the_xml_pump.md").read_text(encoding="utf-8")
    (tmp_path / "my_handlers").mkdir()
    (tmp_path / "my_handlers" / "shop.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    organism.write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    found = {one.name: one for one in load_organism(organism).listeners}
    assert list(found) == ["shop", "console", "buyer", "meta"]
    assert "article" in (found["shop"].xsd or "")
