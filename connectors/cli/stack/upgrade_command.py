"""Bring the data directory of an earlier version over to this one.

  trunkline upgrade --dry-run      say what would be done, and change nothing
  trunkline upgrade                do it

First stop the stack and all doors (trunkline down), and back up. The command starts the local Kafka alone if no
Kafka answers, and looks whether the ledger has the whole log. If it does not, the last commit with the earlier
rules settles the rest: it is checked out into a temporary folder, which needs the history of this repository
and some minutes. Then the command switches the ledger to the rules of this version, compares the views with the
ledger, and builds them anew if they differ. It can be interrupted, and called again at any time.

Exit codes: 0, also when there is nothing to do; 2 wrong arguments; 3 there is no ledger; 4 refused, with the
reason; 5 Kafka does not answer; 1 a step failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from connectors.cli.shared.actions import flag
from connectors.cli.shared.call import Call
from connectors.cli.stack.fold_command import check_doors_closed, fold_state, left_in_log, run_job, switch_fold
from connectors.programs.local_stack import control
from schemas.log_access.event_topic import reach_kafka
from schemas.settings.settings import ENV_PREFIX, PROJECT_ROOT, Settings, settings_environment
from schemas.streams.control.control_fold import records_left
from schemas.tables.fold_version import other_version
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError

# The last commit of each of the two earlier fold versions. It settles what is left of a log.
LAST_COMMITS: Final = {11: "5902560", 12: "2f5aea0"}
_REACH_S: Final = 2.0
# How long the earlier version may settle nothing.
_STUCK_S: Final = 1800.0
_LOOK_EVERY_S: Final = 2.0
# The beginnings of the names of settings that say where everything is, and how large Spark may be.
_PASSED: Final = ("MASTER_KEY", "KAFKA__", "STORAGE__TABLES", "TLS_DIR", "AUDIT__", "SPARK__")
# The ends of the names of paths. A relative one is relative to the checkout.
_PATHS: Final = ("_DIR", "FILE", "_CERTS", "TABLES")

Tell = Callable[[str, str], None]


ARGUMENTS = (
    flag("--dry-run", "say what would be done, and change nothing"),
    flag("--json", "print one JSON object at the end, and the steps to standard error"),
)


def run(call: Call) -> int:
    """Upgrade the data directory, or with `--dry-run` say what an upgrade would do. Returns the exit code 0.

    Raises TrunklineError, with the exit code that the module's text names.
    """
    steps: list[dict[str, Any]] = []

    def tell(step: str, text: str) -> None:
        steps.append({"step": step, "result": text})
        print(f"  {step:<9}{text}", file=sys.stderr if call.json else sys.stdout, flush=True)

    upgrade = Upgrade(call.settings, tell)
    found = upgrade.plan() if call.dry_run else upgrade.carry_out()
    if call.json:
        print(json.dumps({**found, "dry_run": call.dry_run, "steps": steps}))
    return 0


class Upgrade:
    """The upgrade of one data directory.

    Args:
        settings: The settings of the data directory.
        tell: Called with the name of each step and its result.
    """

    def __init__(self, settings: Settings, tell: Tell) -> None:
        self._settings = settings
        self._tell = tell

    def plan(self) -> dict[str, Any]:
        """Say what `carry_out` would do. Nothing is changed, and no program is started.

        Returns:
            The fold versions of ledger and program, and how many records the ledger lacks; None: not known.

        Raises:
            NotFound: There is no ledger.
            Refused: A door is open, the ledger has a newer version or one that is too old, or the earlier
                version is needed and not to be had.
        """
        state = self._checked_state()
        version, own = state["ledger_version"], state["program_version"]
        left = left_in_log(self._settings, state)
        lacking = None if left["left"] is None else left["left"]["ledger"]
        found = {"ledger_version": version, "program_version": own, "left": lacking}
        if control.running_state(self._settings) is not None:
            self._tell("kafka", "the stack's own brokers run; they would be stopped")
        if version == own:
            self._tell("fold", f"version {own} settles the ledger already: nothing to switch")
        else:
            if lacking is None:
                text = "Kafka does not run; it would be started, to see whether records are left"
                refusal = f"; they would be refused, the history here has no code with version {version}"
                self._tell("settle", text + (refusal if _lacks_history(version) else ""))
            elif lacking:
                _check_history(version)
                self._tell("settle", f"{lacking} records are left; {_of_commit(version)} would settle them")
            else:
                self._tell("settle", "the ledger has the whole log")
            self._tell("fold", f"would switch from version {version} to {own}")
        self._tell("views", "would be built anew if their columns differ, and compared with the ledger")
        return found

    def carry_out(self) -> dict[str, Any]:
        """Upgrade the data directory.

        Returns:
            The fold version before, that of the program, and how many records the earlier version settled.

        Raises:
            NotFound: There is no ledger.
            Refused: A door is open, the ledger has a newer version or one that is too old, or the earlier
                version is needed and not to be had.
            BackboneUnreachable: Kafka does not answer.
            TrunklineError: A step failed.
        """
        state = self._checked_state()
        if control.running_state(self._settings) is not None:
            # The supervisor of another version cannot be asked to start the streams.
            self._tell("kafka", "the stack's own brokers are stopped")
            control.stop_detached(self._settings, lambda _: None)
        version, own = state["ledger_version"], state["program_version"]
        settled = self._settle_rest(state) if version != own else 0
        with self._kafka():
            _, switched = switch_fold(self._settings)
        done = f"switched from version {version} to {own}" if switched else f"is at version {own} already"
        self._tell("fold", done)
        self._bring_views()
        self._tell("done", "start the stack: ./trunkline up")
        return {"ledger_version": version, "program_version": own, "left": settled}

    def _checked_state(self) -> dict[str, Any]:
        state = fold_state(self._settings)
        version, oldest = state["ledger_version"], min(LAST_COMMITS)
        if version is not None and version > state["program_version"]:
            raise Refused(other_version(version))
        if version is not None and version < oldest:
            raise Refused(
                f"the ledger has fold version {version}, and upgrade begins with version {oldest}: check out "
                f"commit {LAST_COMMITS[oldest]}, and run its ./trunkline upgrade first"
            )
        check_doors_closed(self._settings)
        return state

    def _settle_rest(self, state: dict[str, Any]) -> int:
        """Have the earlier version settle what the ledger lacks. Returns the number of records."""
        with self._kafka() as is_ours:
            left = left_in_log(self._settings, state)
        if left["left"] is None:
            raise BackboneUnreachable(str(left["why"]))
        count: int = left["left"]["ledger"]
        if not count:
            self._tell("settle", "the ledger has the whole log")
            return 0
        version = state["ledger_version"]
        self._tell("settle", f"{count} records are left; {_of_commit(version)} settles them")
        with _checked_out(version) as folder:
            parts = "kafka,streams" if is_ours else "streams"
            try:
                _run(folder, self._settings, "up", "--only", parts)
                self._wait_until_settled(left["log"])
            finally:
                self._stop_earlier(folder)
        self._tell("settle", f"settled {count} records")
        return count

    def _wait_until_settled(self, ends: dict[str, int]) -> None:
        """Wait until ledger and views have the log up to `ends`. Prints how many records are left.

        No door is open, so these are the ends of the log. Raises TrunklineError if nothing changes for half an
        hour.
        """
        before, deadline = None, time.monotonic() + _STUCK_S
        while time.monotonic() < deadline:
            lacking = records_left(fold_state(self._settings), ends)
            left = {part: sum(lacks.values()) for part, lacks in lacking.items()}
            if not any(left.values()):
                return
            if left != before:
                before, deadline = left, time.monotonic() + _STUCK_S
                text = f"  left: {left['ledger']} records for the ledger, {left['views']} for the views"
                print(text, file=sys.stderr, flush=True)
            time.sleep(_LOOK_EVERY_S)
        raise TrunklineError(
            f"the earlier version has settled nothing for {_STUCK_S:g} s: look into "
            f"{self._settings.data_path / 'logs' / 'streams.log'}, and try again"
        )

    def _stop_earlier(self, folder: Path) -> None:
        """Stop all that the earlier version has started, before its code is deleted."""
        try:
            _run(folder, self._settings, "down")
        except TrunklineError:
            # Perhaps it could not even set itself up.
            control.stop_detached(self._settings, lambda _: None)

    @contextmanager
    def _kafka(self) -> Iterator[bool]:
        """Have Kafka run. Yields whether it is the stack's own, which this starts and stops."""
        try:
            reach_kafka(self._settings.kafka, _REACH_S)
        except BackboneUnreachable:
            self._tell("kafka", "starts alone")
            control.start_detached(self._settings, ["kafka"], lambda _: None)
            try:
                yield True
            finally:
                control.stop_detached(self._settings, lambda _: None)
        else:
            yield False

    def _bring_views(self) -> None:
        """Compare the views with the ledger, and build them anew if they differ or have other columns."""
        check = run_job(self._settings, "rebuild_views", "--check")
        if check.returncode:
            self._tell("views", "are built anew")
            built = run_job(self._settings, "rebuild_views")
            if built.returncode:
                raise TrunklineError(f"the views cannot be built: {built.stderr.strip()}")
            check = run_job(self._settings, "rebuild_views", "--check")
        if check.returncode:
            raise TrunklineError(f"the views differ from the ledger: {(check.stderr or check.stdout).strip()}")
        self._tell("views", "are those of the ledger")


def _of_commit(version: int) -> str:
    commit = LAST_COMMITS.get(version)
    return f"the earlier version {version}" if commit is None else f"commit {commit[:7]} (version {version})"


def _lacks_history(version: int) -> str:
    """Return git's message if this is no clone whose history has the code of the earlier version, else ""."""
    found = _git("cat-file", "-e", f"{LAST_COMMITS.get(version, 'none')}^{{commit}}")
    return found.stderr.strip() if found.returncode else ""


def _check_history(version: int) -> None:
    """Raise Refused if the code of the earlier version is not to be had."""
    if why := _lacks_history(version):
        raise Refused(
            f"the ledger lacks records, and the history here has no code with version {version} "
            f"({why}): start the version before (./trunkline up --only kafka,streams), "
            "wait until ./trunkline fold status says that none are left, stop it, and try again"
        )


@contextmanager
def _checked_out(version: int) -> Iterator[Path]:
    """Check out the last commit with a fold version into a temporary folder.

    Raises Refused if this is no clone with the history of the repository.
    """
    _check_history(version)
    with tempfile.TemporaryDirectory(prefix="trunkline-upgrade-") as scratch:
        folder = Path(scratch) / "earlier"
        added = _git("worktree", "add", "--detach", str(folder), LAST_COMMITS[version])
        if added.returncode:
            raise TrunklineError(f"git cannot check out the earlier version: {added.stderr.strip()}")
        try:
            yield folder
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(PROJECT_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 ours


def _run(folder: Path, settings: Settings, *arguments: str) -> None:
    """Run the wrapper of the earlier version, which sets itself up. Its progress goes to standard error."""
    done = subprocess.run(  # noqa: S603 ours
        [str(folder / "trunkline"), *arguments],
        env=_environment_for_earlier(settings),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise TrunklineError(
            f"'trunkline {' '.join(arguments)}' of the earlier version ended with {done.returncode}"
        )


def _environment_for_earlier(settings: Settings) -> dict[str, str]:
    # Without the variables of our own wrapper, by which the earlier one would import our code.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TRUNKLINE") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    passed = {f"{ENV_PREFIX}DATA_DIR": str(settings.data_path)}
    for name, value in settings_environment(settings).items():
        setting = name.removeprefix(ENV_PREFIX)
        if setting.startswith(_PASSED):
            is_relative = setting.endswith(_PATHS) and "://" not in value
            passed[name] = str(PROJECT_ROOT / value) if is_relative else value
    return {**kept, "TRUNKLINE_CONF": os.devnull, **passed}
