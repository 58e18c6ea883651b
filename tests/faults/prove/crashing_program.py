"""One of our programs with the named crash points of `crash_points.py`: before and after Kafka's ack, and in
each step of the reactor.

python -P -m tests.faults.prove.crashing_program PART MODULE
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from typing import Any

from connectors.log.publisher import Append, Publisher
from connectors.log.shared_records import OwnRecord
from schemas.wire.record import OutgoingRecord, Position
from tests.faults.prove.crash_points import Points


def install_ack_points(points: Points) -> None:
    """Around Kafka's acknowledgement: when a record was handed over, and when the answer has come and nobody
    was told.
    """
    send, set_result, settle = Publisher._send, Append.set_result, OwnRecord.settle

    def sending(publisher: Publisher, record: OutgoingRecord, *more: Any) -> None:
        send(publisher, record, *more)
        points.hit("before_kafka_ack")

    def acknowledged(append: Append, position: Position) -> None:
        points.hit("after_kafka_ack")
        set_result(append, position)

    def came_back(sent: OwnRecord, found: Any) -> None:
        points.hit("after_kafka_ack")
        settle(sent, found)

    OwnRecord.settle = came_back  # type: ignore[method-assign]
    Publisher._send = sending  # type: ignore[method-assign]
    Append.set_result = acknowledged  # type: ignore[method-assign]


def install_reactor_steps(points: Points) -> None:
    """At each step that the reactor tells."""
    from connectors.programs.gateway_program import program

    program.Reactor = partial(program.Reactor, step=lambda name: points.hit(f"reactor_{name}"))  # type: ignore


def main(part: str, module: str) -> None:
    """Run the program as `python -m MODULE` does."""
    points = Points(part)
    install_ack_points(points)
    if part == "gateway":
        install_reactor_steps(points)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
