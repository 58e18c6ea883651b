"""The local stack: Kafka, Mosquitto, bridges, gateway, XML pump and streaming jobs on loopback, supervised.

Starts the other programs as processes, so it must not import the gateway, a bridge or a job.
"""

from connectors.programs.local_stack.part import Part, PartFailed
from connectors.programs.local_stack.part_plan import ALL_PARTS
from connectors.programs.local_stack.ports import free_port
from connectors.programs.local_stack.stack import LocalStack

__all__ = ["ALL_PARTS", "LocalStack", "Part", "PartFailed", "free_port"]
