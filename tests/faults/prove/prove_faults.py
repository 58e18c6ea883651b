"""Runs seeds of faults against the backbone, and says what was lost, doubled, divergent, disordered or changed.

`./trunkline prove` starts it. One Kafka and one Mosquitto serve all seeds; each has a topic, tables,
checkpoints, a data directory and ids of its own. Exit codes: 0, nothing was found; 1, something was, or a
hundred seeds did not meet each fault; 130, interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from schemas.settings.settings import PROJECT_ROOT
from tests.faults.prove.brokers import Brokers
from tests.faults.prove.comparison import KINDS, MISBEHAVED
from tests.faults.prove.results import Results, programs_hash, summary
from tests.faults.prove.schedule import draw_schedule
from tests.faults.prove.seed_run import SeedResult, SeedRun

RESULTS: Final = PROJECT_ROOT / "var" / "prove.jsonl"
# So many seeds come to each point several times. That none died there says that the point is not what it was.
MEETS_ALL: Final = 100
_SHOWN: Final = 5
_INTERRUPTED: Final = 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments, which the command has checked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, required=True)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def run_seed(seed: int, root: Path, brokers: Brokers) -> dict[str, Any]:
    """One seed to its end; its folder is kept if anything was found."""
    folder = Path(tempfile.mkdtemp(prefix=f"seed-{seed}-", dir=root))
    schedule = draw_schedule(seed)
    tell(f"seed {seed}: {', '.join(schedule.faults)}")
    run = SeedRun(schedule, folder, brokers)
    try:
        # The supervisor's messages about parts that die do not belong to this program's output.
        with (folder / "harness.log").open("w") as log, contextlib.redirect_stdout(log):
            result = run.run()
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except Exception as error:  # a seed that cannot be judged is a finding, and the next one is run
        result = SeedResult(seed, run.oracle.acknowledged)
        result.findings = [{"kind": MISBEHAVED, "what": f"the run failed: {type(error).__name__}: {error}"}]
    if result.findings:
        result.folder = str(folder)
        told = ", ".join(f"{kind} {count}" for kind in KINDS if (count := _count(result, kind)))
        tell(f"seed {seed}: FOUND {told}; its data is in {folder}")
        for finding in result.findings[:_SHOWN]:
            tell(f"  {finding['kind']}: {finding['what'][:400]}")
        tell(f"  again: ./trunkline prove --seeds 1 --first-seed {seed} --results {folder / 'again.jsonl'}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
        tell(f"seed {seed}: nothing found, {result.acknowledged} acknowledged, {result.seconds:.0f} s")
    return result.as_json()


def _count(result: SeedResult, kind: str) -> int:
    return sum(finding["kind"] == kind for finding in result.findings)


def tell(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def show(found: dict[str, Any], as_json: bool) -> None:
    """The sum of all results."""
    if as_json:
        print(json.dumps(found))
        return
    print(", ".join(f"{name} {found[name]}" for name in ("seeds", "acknowledged", *KINDS, "unjudged")))
    print("delivered:", ", ".join(f"{name} {count}" for name, count in found["deliveries"].items()))
    print("injected:", ", ".join(f"{name} {count}" for name, count in found["faults"].items()))
    if found["not_injected"]:
        print("not injected by these seeds:", ", ".join(found["not_injected"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds that have no result yet."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell that starts it in the background lets it ignore Ctrl-C.
        signal.signal(number, signal.default_int_handler)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.ERROR)
    results = Results(args.results, programs_hash())
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    left = [seed for seed in seeds if not results.has(seed)]
    code = 0
    if len(left) < len(seeds):
        tell(f"{len(seeds) - len(left)} of {len(seeds)} seeds have their result in {args.results}")
    if left:
        root = Path(tempfile.mkdtemp(prefix="trunkline-prove-"))
        try:
            with Brokers(root) as brokers:
                for seed in left:
                    results.add(run_seed(seed, root, brokers))
                    brokers.forget_seeds()
        except KeyboardInterrupt:
            tell(f"interrupted; the same again goes on: the results are in {args.results}")
            code = _INTERRUPTED
        finally:
            _tidy(root)
    found = summary(results.of(seeds))
    show(found, args.json)
    return code or exit_code(found)


def exit_code(found: dict[str, Any]) -> int:
    """Of the sum of all results: 1 when anything was found, or so many seeds never met a fault, else 0."""
    is_shown = found["seeds"] < MEETS_ALL or not found["not_injected"]
    return int(any(found[kind] for kind in KINDS) or not is_shown)


def _tidy(root: Path) -> None:
    """Leave nothing but the data of seeds with a finding."""
    kept = [folder for folder in root.glob("seed-*") if folder.is_dir()]
    for path in root.iterdir():
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)
    if not kept:
        root.rmdir()


if __name__ == "__main__":
    sys.exit(main())
