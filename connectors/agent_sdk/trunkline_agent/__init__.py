"""The library of agents, jobs and delegators: the distribution `trunkline-agent`.

Imports the standard library, and h11 for HTTP. The package of an extra imports the extra's libraries, too. The
whole product imports the rules of the wire from here, so nothing here may import `schemas`, `connectors` or
`jobs`. The names below are loaded when they are first used, because most programs need few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trunkline_agent import errors
    from trunkline_agent.agent import Agent
    from trunkline_agent.async_agent import AsyncAgent
    from trunkline_agent.async_message import AsyncMessage
    from trunkline_agent.broker import Broker
    from trunkline_agent.credentials import Credentials, HubAccess, McpAccess, MqttAccess
    from trunkline_agent.hub.hub_values import BlobReference, Published, Sent
    from trunkline_agent.hub.operation_values import AgentInfo, Schedule
    from trunkline_agent.jobs.async_delegator import AsyncDelegator
    from trunkline_agent.jobs.async_job import AsyncJob
    from trunkline_agent.jobs.delegator import Delegator
    from trunkline_agent.jobs.delegator_plans import JobUpdate, SubmittedJob, WatchTimeout
    from trunkline_agent.jobs.job import Job
    from trunkline_agent.message import Message
    from trunkline_agent.wire.receipt import Receipt

__all__ = [
    "Agent",
    "AgentInfo",
    "AsyncAgent",
    "AsyncDelegator",
    "AsyncJob",
    "AsyncMessage",
    "BlobReference",
    "Broker",
    "Credentials",
    "Delegator",
    "HubAccess",
    "Job",
    "JobUpdate",
    "McpAccess",
    "Message",
    "MqttAccess",
    "Published",
    "Receipt",
    "Schedule",
    "Sent",
    "SubmittedJob",
    "WatchTimeout",
    "errors",
]

_VALUES: Final = "trunkline_agent.hub.hub_values"
_OF_OPERATIONS: Final = "trunkline_agent.hub.operation_values"
_CREDENTIALS: Final = "trunkline_agent.credentials"
_MODULE_OF: Final = {
    "Agent": "trunkline_agent.agent",
    "AgentInfo": _OF_OPERATIONS,
    "AsyncAgent": "trunkline_agent.async_agent",
    "AsyncDelegator": "trunkline_agent.jobs.async_delegator",
    "AsyncJob": "trunkline_agent.jobs.async_job",
    "AsyncMessage": "trunkline_agent.async_message",
    "BlobReference": _VALUES,
    "Broker": "trunkline_agent.broker",
    "Credentials": _CREDENTIALS,
    "Delegator": "trunkline_agent.jobs.delegator",
    "HubAccess": _CREDENTIALS,
    "Job": "trunkline_agent.jobs.job",
    "JobUpdate": "trunkline_agent.jobs.delegator_plans",
    "McpAccess": _CREDENTIALS,
    "Message": "trunkline_agent.message",
    "MqttAccess": _CREDENTIALS,
    "Published": _VALUES,
    "Receipt": "trunkline_agent.wire.receipt",
    "Schedule": _OF_OPERATIONS,
    "Sent": _VALUES,
    "SubmittedJob": "trunkline_agent.jobs.delegator_plans",
    "WatchTimeout": "trunkline_agent.jobs.delegator_plans",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    if name == "errors":
        return import_module("trunkline_agent.errors")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names beside those that are loaded."""
    return sorted({*globals(), *__all__})
