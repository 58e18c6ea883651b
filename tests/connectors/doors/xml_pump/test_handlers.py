"""Handlers by their names: what is one, what is none and what to do about it, and how one is loaded anew."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connectors.doors.xml_pump import payload
from connectors.doors.xml_pump.handlers import HandlerError, handler_in, handles, imported, load_handler


@payload("thing", namespace="urn:example:handlers:1")
@dataclass
class Thing:
    """A thing."""

    name: str


@payload("other", namespace="urn:example:handlers:1")
@dataclass
class Other:
    """Another."""

    name: str


@handles(Thing, replies=[Other])
async def with_context(message: Any, context: Any) -> bytes | None:
    """Takes both."""
    return None


@handles(Thing)
async def alone(message: Any) -> bytes | None:
    """Takes the message."""
    return None


def plain() -> None:
    """No handler."""


@pytest.mark.requirement("XP-01")
def test_a_handler_is_found_by_its_name_with_what_it_takes():
    found = load_handler(f"{__name__}:with_context")
    assert found.function is with_context
    assert (found.payload.cls, found.wants_context) == (Thing, True)
    assert [kind.cls for kind in found.replies] == [Other]
    assert not load_handler(f"{__name__}:alone").wants_context


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.at.all:f", "cannot import nowhere.at.all"),
        (f"{__name__}:missing", "has no missing"),
        (f"{__name__}:plain", "decorate it with @handles"),
        ("no_colon", "write module:attribute"),
        (f"{__name__}:", "write module:attribute"),
    ],
)
def test_what_is_no_handler_is_refused_with_what_to_do(name: str, why: str):
    with pytest.raises(HandlerError, match=why):
        load_handler(name)


def test_a_module_that_fails_in_any_way_while_it_is_imported_is_a_handler_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, source in {"ends_it": "raise SystemExit(3)", "wrong": "def (", "raises": "1 / 0"}.items():
        (tmp_path / f"{name}.py").write_text(source)
        with pytest.raises(HandlerError, match=f"cannot import {name}"):
            load_handler(f"{name}:f")
        assert name not in sys.modules


def test_what_cannot_be_a_handler_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match="async def"):
        handles(Thing)(lambda message: None)

    async def three(a: Any, b: Any, c: Any) -> None:
        """Takes too much."""

    async def named(*, message: Any) -> None:
        """Takes it by name."""

    for function in (three, named):
        with pytest.raises(TypeError, match="takes"):
            handles(Thing)(function)
    with pytest.raises(TypeError):
        handles(dict)


SOURCE = """
from dataclasses import dataclass
from connectors.doors.xml_pump import payload
from connectors.doors.xml_pump.handlers import handles

@payload("thing", namespace="urn:example:handlers:1")
@dataclass
class Thing:
    name: str

NUMBER = 1

@handles(Thing)
async def answer(message):
    return NUMBER
"""


@pytest.mark.requirement("XP-12")
def test_a_module_loaded_anew_is_another_one_and_the_old_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "swapped.py"
    file.write_text(SOURCE)
    old = handler_in(imported("swapped"), "answer")
    # Of the same length, within the same second: no cached compilation may be taken for it.
    file.write_text(SOURCE.replace("NUMBER = 1", "NUMBER = 2"))
    new = handler_in(imported("swapped", anew=True), "answer")

    def answer_of(handler: Any) -> int:
        return int(handler.function.__globals__["NUMBER"])

    assert (answer_of(old), answer_of(new)) == (1, 2)
    file.write_text("def (")
    with pytest.raises(HandlerError):
        imported("swapped", anew=True)
    assert answer_of(handler_in(imported("swapped"), "answer")) == 2
