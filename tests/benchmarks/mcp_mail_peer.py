"""The peer of `bench mcp` that others wrote: `mcp-agent-mail` of PyPI, in an environment of its own.

It keeps messages in SQLite (WAL, synchronous=NORMAL) and each one as files in a Git repository, too. It checks
no signatures. Its logs, its language models and its rate limits are switched off.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import aiohttp

from schemas.settings.settings import PROJECT_ROOT
from tests.benchmarks.mcp_load import READ_LIMIT, posted, request

RELEASE: Final = "0.1.0"
FOLDER: Final = PROJECT_ROOT / "var" / "bench" / "mcp-agent-mail"
HOW: Final = f"python -m venv {FOLDER} && {FOLDER}/bin/pip install mcp-agent-mail=={RELEASE}"
PROJECT: Final = "/bench"
# It takes names of this form only: an adjective and a noun of its own lists.
_FIRST: Final = ("Blue", "Green", "Red", "Purple", "White", "Black")
_SECOND: Final = ("Lake", "Hill", "Stone", "River", "Mountain")
NAMES: Final = [first + second for first in _FIRST for second in _SECOND]
ENVIRONMENT: Final = {
    "LLM_ENABLED": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HTTP_RBAC_ENABLED": "false",
    "HTTP_RATE_LIMIT_ENABLED": "false",
    "CONTACT_ENFORCEMENT_ENABLED": "false",
    "TOOLS_LOG_ENABLED": "false",
    "LOG_RICH_ENABLED": "false",
}


def is_installed(folder: Path = FOLDER) -> bool:
    """True if it is there."""
    return any(folder.glob("lib/python3*/site-packages/mcp_agent_mail/http.py"))


def command(port: int, work: Path, folder: Path = FOLDER) -> tuple[list[str], dict[str, str]]:
    """How it is started, and in which environment."""
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    places = {
        "DATABASE_URL": f"sqlite+aiosqlite:///{work}/mail.sqlite3",
        "STORAGE_ROOT": str(work / "store"),
        "HOME": str(work),
    }
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    program = folder / "bin" / Path(sys.executable).name
    python = program if program.exists() else folder / "bin" / "python"
    return [str(python), "-m", "mcp_agent_mail.http", *arguments], inherited | ENVIRONMENT | places


class MailTools:
    """Its tools as those of the load."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str) -> None:
        self._session = session
        self._url = url
        self._name = name

    async def _call(self, tool: str, **arguments: Any) -> Any:
        params = {"name": tool, "arguments": arguments}
        return await posted(self._session, self._url, request("tools/call", params), {})

    async def open_project(self) -> None:
        """Before anybody takes part."""
        await self._call("ensure_project", human_key=PROJECT)

    async def register(self, task: str) -> None:
        """Take part, or say what one is doing now."""
        said = {"program": "bench", "model": "none", "name": self._name, "task_description": task}
        await self._call("register_agent", project_key=PROJECT, **said)

    async def send(self, recipient: str, text: str) -> None:
        """As Tools."""
        said = {"sender_name": self._name, "to": [recipient], "subject": "bench", "body_md": text}
        await self._call("send_message", project_key=PROJECT, **said)

    async def unread(self) -> list[Any]:
        """As Tools; it shows the newest ones, also those that were read."""
        wanted = {"agent_name": self._name, "limit": READ_LIMIT, "include_bodies": True}
        found = await self._call("fetch_inbox", project_key=PROJECT, **wanted)
        return [message["id"] for message in found["structuredContent"]["result"]]

    async def mark(self, message_id: Any) -> None:
        """As Tools."""
        which = {"agent_name": self._name, "message_id": message_id}
        await self._call("mark_message_read", project_key=PROJECT, **which)

    async def discover(self) -> None:
        """As Tools: the list of agents is a resource here."""
        uri = f"resource://agents/{PROJECT.strip('/')}"
        await posted(self._session, self._url, request("resources/read", {"uri": uri}), {})

    async def status(self, text: str) -> None:
        """As Tools."""
        await self.register(text)
