"""Runs a page of the tutorial as its reader does: saves its files, and runs its commands in order.

A page's fenced blocks say by their first line what they are:

- ```` ```sh ```` has commands, which must succeed. With `background`, they are a program in a second terminal.
  It goes on while the later blocks run, and is interrupted (Ctrl-C) at the end of the page. Variables that a
  block exports are there in the later blocks of the page.
- ```` ```text ```` is a part of the output of the block before. Its lines must be there in this order; `...`
  stands for any text. After a program in a second terminal its output so far is read, for a while.
- Any other block has the name of a file behind its language, such as ```` ```python echo_agent.py ````, and is
  saved in the reader's folder.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from schemas.settings.settings import PROJECT_ROOT
from tests.source_files import ROOT

COMMAND_S: Final = 180.0
OUTPUT_S: Final = 120.0
END_S: Final = 20.0
# Exported variables go from block to block, as in one terminal.
_BEGIN: Final = "if [[ -f .exported ]]; then . ./.exported; fi\n"
_END: Final = "trap 'export -p >.exported' EXIT\n"
_FENCE: Final = re.compile(r"^```(\w+) *(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the rest of its first line, its text and its line's number."""

    language: str
    about: str
    text: str
    line: int


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page that name a language. A block without one fails the test."""
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        if opened is not None:
            if line == "```":
                yield Block(opened[0], opened[1], "\n".join(lines) + "\n", opened[2])
                opened = None
            else:
                lines.append(line)
        elif line.startswith("```"):
            found = _FENCE.match(line)
            assert found, f"{page}:{number}: the block does not say what it is"
            opened, lines = (found[1], found[2].strip(), number), []


class Reader:
    """A reader who follows pages in a folder. Call `kill` at the end.

    `environment` has the variables of the commands. The folder has a link to the wrapper `trunkline`.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = dict(environment)
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "trunkline").exists():
            (folder / "trunkline").symlink_to(PROJECT_ROOT / "trunkline")

    def follow(self, page: Path, *, leave_out: tuple[str, ...] = ()) -> None:
        """Follow a page to its end. Commands whose text is in `leave_out` are not run."""
        output: Path | None = None
        is_running = False
        ran = 0
        (self.folder / ".exported").unlink(missing_ok=True)
        for block in blocks_of(page):
            where = f"{page}:{block.line}"
            if block.language == "text":
                assert output is not None, f"{where}: there is no command before this output"
                self._expect(block.text, output, where, OUTPUT_S if is_running else 0)
            elif block.language != "sh":
                assert block.about, f"{where}: the block has no file name"
                file = self.folder / block.about
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text, encoding="utf-8")
            elif block.text.strip() not in leave_out:
                output = self.folder / f".output-{page.stem}-{block.line}"
                is_running = block.about == "background"
                self._start(block.text, output, where, is_running=is_running)
                ran += 1
        assert ran, f"{page} has no command"
        self.interrupt()

    def run(self, commands: str, where: str) -> None:
        """Run commands, which must succeed. `where` says in which place of the pages they are."""
        self._start(commands, self.folder / ".output", where, is_running=False)

    def _start(self, commands: str, output: Path, where: str, *, is_running: bool) -> None:
        with output.open("wb") as stream:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", f"{_BEGIN}{'' if is_running else _END}{commands}"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if is_running:
            self._running.append((process, output))
            return
        try:
            code = process.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{where}: does not end: {_text(output)}") from None
        assert code == 0, f"{where}: ended with {code}: {_text(output)}"

    def _expect(self, text: str, output: Path, where: str, within_s: float) -> None:
        lines = [re.escape(line.strip()).replace(r"\.\.\.", ".*") for line in text.splitlines() if line.strip()]
        wanted = re.compile(".*".join(lines), re.DOTALL)
        deadline = time.monotonic() + within_s
        while wanted.search(_text(output)) is None:
            assert time.monotonic() < deadline, f"{where}: the output is another: {_text(output)}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Interrupt the programs in second terminals, as Ctrl-C does. They must end."""
        running, self._running = self._running, []
        for process, _ in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        for process, output in running:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise AssertionError(f"a program goes on after Ctrl-C: {_text(output)}") from None
            # A plain Python program shows where Ctrl-C met it.
            _, trace, rest = _text(output).partition("Traceback")
            assert not trace or rest.rstrip().endswith("KeyboardInterrupt"), _text(output)

    def kill(self) -> None:
        """End the programs in second terminals at once, after a failure."""
        for process, _ in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(END_S)


def _text(output: Path) -> str:
    return output.read_text(encoding="utf-8", errors="replace")[-4000:]
