"""The public surface of the library: its names, sync and async alike, and what importing it costs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import h11
import pytest

import trunkline_agent
from tests.source_files import ROOT
from trunkline_agent import Agent, AsyncAgent, AsyncMessage, Message

SHOW = "import sys; before = set(sys.modules); {}; print(*sorted(set(sys.modules) - before))"


def modules_of(statement):
    """The modules that a statement loads in a new Python without site packages but this library and h11."""

    places = (str(ROOT / "connectors/agent_sdk"), str(Path(h11.__file__).parents[1]))
    code = f"import sys; sys.path += {places!r}; " + SHOW.format(statement)
    shown = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    return set(shown.stdout.split())


def public(kind):
    """The public methods of a class, without those that only its base has."""
    return {name: one for name, one in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


@pytest.mark.requirement("AG-14")
@pytest.mark.parametrize(("sync", "other"), [(Agent, AsyncAgent), (Message, AsyncMessage)])
def test_the_async_class_has_the_same_methods_with_the_same_parameters(sync, other):
    assert public(sync).keys() == public(other).keys()
    for name, method in public(sync).items():
        theirs = public(other)[name]
        as_sync = str(inspect.signature(theirs)).replace("Async", "")
        assert as_sync == str(inspect.signature(method)), name
        assert inspect.getdoc(method) and inspect.getdoc(theirs), name
        assert inspect.iscoroutinefunction(theirs) == (name != "messages"), name


@pytest.mark.long
@pytest.mark.requirement("AG-14")
def test_the_sync_half_is_as_generated_from_the_async_half():
    command = [sys.executable, str(ROOT / ".ci" / "client_side.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.requirement("AG-14")
def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error():
    for name in trunkline_agent.__all__:
        assert getattr(trunkline_agent, name) is not None and name in dir(trunkline_agent)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = trunkline_agent.Nothing


@pytest.mark.requirement("AG-07")
def test_the_package_itself_loads_nothing_and_the_sync_agent_neither_asyncio_nor_tls():
    assert not {one for one in modules_of("import trunkline_agent") if one.startswith("trunkline_agent.")}
    loaded = modules_of("from trunkline_agent import Agent, Credentials, Message")
    assert {"h11", "trunkline_agent.agent"} <= loaded
    assert not {"asyncio", "ssl", "orjson", "msgspec", "pydantic", "structlog"} & loaded


@pytest.mark.long
@pytest.mark.requirement("AG-07")
def test_importing_the_agent_costs_little():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "connectors/agent_sdk")}

    def cost(imported):
        code = f"import time; began = time.process_time(); {imported}; print(time.process_time() - began)"
        shown = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        return float(shown.stdout)

    # In turns, because the speed of a machine halves in slow hours.
    both = [(cost("from trunkline_agent import Agent"), cost("import asyncio")) for _ in range(3)]
    assert min(one for one, _ in both) < 4 * min(yardstick for _, yardstick in both)
