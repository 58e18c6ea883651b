"""Runs checks, several at once, and collects their results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from connectors.tools.conformance import (
    handling_checks,
    hub_checks,
    job_checks,
    vector_checks,
)
from connectors.tools.conformance.client_process import PROTOCOL, ClientMisbehaved, ClientProcess, ClientRefused
from connectors.tools.conformance.scene import FEATURES, Check, CheckFailed, Scene
from connectors.tools.conformance.target import Target
from trunkline_agent.errors import TrunklineError, UsageError

PASSED: Final = "passed"
FAILED: Final = "failed"
NOT_SUPPORTED: Final = "not supported"

CHECKS: Final[tuple[Check, ...]] = (
    *vector_checks.CHECKS,
    *hub_checks.CHECKS,
    *handling_checks.CHECKS,
    *job_checks.CHECKS,
)
# Most checks wait for most of their time.
_AT_ONCE: Final = 6


@dataclass(frozen=True)
class Client:
    """The answer of a client to `hello`."""

    name: str
    version: str
    features: frozenset[str]


@dataclass(frozen=True)
class Result:
    """The result of one check: PASSED, FAILED or NOT_SUPPORTED.

    `why` says why it failed, or which feature is missing. `noise` is the end of the standard error of the
    clients of a failed check.
    """

    check: Check
    outcome: str
    why: str = ""
    seconds: float = 0.0
    noise: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "check": self.check.name,
            "says": self.check.says,
            "outcome": self.outcome,
            "why": self.why or None,
            "seconds": round(self.seconds, 2),
            "stderr": self.noise or None,
        }


def wanted_checks(names: Sequence[str]) -> list[Check]:
    """Return the checks of these names, all without a name. Raises UsageError for an unknown name."""
    known = {check.name: check for check in CHECKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no check {', '.join(unknown)}; --list shows them")
    return [known[name] for name in dict.fromkeys(names)] if names else list(CHECKS)


def greet(command: Sequence[str]) -> Client:
    """Start the client, greet it, end it, and return its answer.

    Raises ClientMisbehaved if the process breaks the protocol or its answer is no greeting.
    """
    process = ClientProcess(command)
    try:
        answer = process.call("hello", protocol=PROTOCOL)
        features = answer.get("features")
        if answer.get("protocol") != PROTOCOL or not isinstance(features, list):
            raise CheckFailed(f"hello: expected protocol {PROTOCOL} and a list of features, found {answer!r}")
        unknown = [one for one in features if one not in FEATURES]
        if unknown:
            raise CheckFailed(f"hello: unknown features {unknown}; there are {', '.join(FEATURES)}")
        process.leave()
    except (ClientMisbehaved, ClientRefused, CheckFailed) as error:
        process.close()
        noise = f"\nIts standard error ends with:\n{process.noise}" if process.noise else ""
        raise ClientMisbehaved(f"{error}{noise}") from None
    process.close()
    return Client(str(answer.get("name")), str(answer.get("version")), frozenset(features))


def run_checks(
    command: Sequence[str],
    client: Client,
    checks: Sequence[Check],
    target: Target | None,
    done: Callable[[Result], object] = lambda _result: None,
) -> list[Result]:
    """Run checks, several at once, and return their results in the order of the checks.

    Args:
        command: The command of the client.
        client: Its answer to `hello`.
        checks: The checks.
        target: The stack. None: there is none, and no check that the client supports needs one.
        done: Called with each result when it is there.
    """
    results: dict[str, Result] = {}
    supported = []
    for check in checks:
        missing = sorted(check.needs - client.features)
        if missing:
            results[check.name] = Result(check, NOT_SUPPORTED, f"the client lacks {', '.join(missing)}")
            done(results[check.name])
        else:
            supported.append(check)
    with tempfile.TemporaryDirectory(prefix="trunkline-conformance-") as folder:
        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            runs = [pool.submit(run_check, check, command, target, Path(folder)) for check in supported]
            for run in as_completed(runs):
                results[run.result().check.name] = run.result()
                done(run.result())
        finally:
            # After Ctrl-C, checks that have not begun do not begin.
            pool.shutdown(cancel_futures=True)
    return [results[check.name] for check in checks]


def run_check(check: Check, command: Sequence[str], target: Target | None, folder: Path) -> Result:
    """Run one check, whatever the client supports, and return its result: passed, or failed with the reason.

    A client that misbehaves raises nothing. Raises FileExistsError for a folder that has run the check before.

    Args:
        check: The check.
        command: The command of the client.
        target: The stack. None: there is none, and the check needs none.
        folder: A folder, in which the check makes one of its own for the client's state.
    """
    own = folder / check.name
    own.mkdir(parents=True)
    scene = Scene(target, command, own)
    started = time.monotonic()
    why = ""
    try:
        check.run(scene)
    except (CheckFailed, ClientRefused, ClientMisbehaved) as error:
        why = str(error)
    except (TrunklineError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    finally:
        scene.close()
    noise = "\n".join(client.noise for client in scene.clients if client.noise) if why else ""
    return Result(check, FAILED if why else PASSED, why, time.monotonic() - started, noise)
