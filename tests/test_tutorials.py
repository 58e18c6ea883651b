"""The pages of the tutorial, followed as a newcomer follows them: every block of them is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.programs.local_stack import child_process
from schemas.settings.settings import settings_environment
from tests.own_settings import stack_settings as free_settings
from tests.source_files import ROOT
from tests.tutorial_pages import Reader, blocks_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

FOLDER = Path("docs/tutorial")
FIRST = "first_agent.md"
# The stack of the first page goes on for the others, and is stopped after the last one.
DOWN = "./trunkline down"
OTHERS = tuple(sorted(path.name for path in (ROOT / FOLDER).glob("*.md") if path.name != FIRST))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader who has followed the first page, but for its last command, which is run at the end."""
    folder = tmp_path_factory.mktemp("tutorial")
    settings = free_settings(folder / "data")
    environment = {**os.environ, **settings_environment(settings)}
    environment.pop("PYTHONPATH", None)
    reader = Reader(folder / "reader", environment)
    try:
        reader.follow(FOLDER / FIRST, leave_out=(DOWN,))
        yield reader
        reader.interrupt()
        reader.run(DOWN, f"{FOLDER / FIRST}, its last command")
    finally:
        reader.kill()
        child_process.kill_marked(child_process.mark_of(settings.data_path, ""))


@pytest.mark.requirement("AG-50")
def test_the_first_page_can_be_followed_from_its_first_command_to_its_last(reader: Reader) -> None:
    commands = [block.text.strip() for block in blocks_of(FOLDER / FIRST) if block.language == "sh"]
    assert (commands[0], commands[-1]) == ("./trunkline up", DOWN)
    assert (reader.folder / "echo_agent.py").is_file()


@pytest.mark.node
@pytest.mark.requirement("AG-50")
@pytest.mark.parametrize("page", OTHERS)
def test_a_further_page_can_be_followed_on_the_stack_of_the_first(reader: Reader, page: str) -> None:
    reader.follow(FOLDER / page)
