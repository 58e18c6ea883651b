"""A peer of `bench mcp`: the same tools on the `mcp` package's own server and SQLite (WAL, synchronous=FULL).

It checks the same signatures and remembers them in the same database. It knows no verdicts, no ledger and no
second server. Its arguments are its port, its database and a JSON file of names and public keys.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline_agent.mcp import signing as agent_signing

TABLES = """
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;
CREATE TABLE agents (name TEXT PRIMARY KEY, public_key TEXT, status TEXT);
CREATE TABLE messages (id TEXT PRIMARY KEY, sender TEXT, recipient TEXT, content TEXT, priority INTEGER,
                       posted_at INTEGER, read INTEGER);
CREATE INDEX mailbox ON messages (recipient, read, priority, posted_at);
CREATE TABLE calls (signature TEXT PRIMARY KEY, at REAL);
"""
PRIORITIES = ("high", "normal", "low")
READS = (b'"discover_agents"', b'"get_my_messages"')


class Signed:
    """ASGI middleware: lets in who has signed, a changing call once for each signature."""

    def __init__(self, app: ASGIApp, database: sqlite3.Connection) -> None:
        self._app = app
        self._database = database

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if not self._is_good(headers, body):
            await JSONResponse({"reason": "unauthorized"}, 403)(scope, receive, send)
            return

        async def again() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

    def _is_good(self, headers: dict[str, str], body: bytes) -> bool:
        names = (agent_signing.AGENT_HEADER, agent_signing.TIMESTAMP_HEADER, agent_signing.SIGNATURE_HEADER)
        agent, timestamp, signature = (headers.get(name.lower(), "") for name in names)
        row = self._database.execute("SELECT public_key FROM agents WHERE name = ?", (agent,)).fetchone()
        if row is None or not agent_signing.verify(row[0], timestamp, body, signature):
            return False
        if abs(float(timestamp) - time.time()) > agent_signing.WINDOW_S:
            return False
        if b'"tools/call"' not in body or any(name in body for name in READS):
            return True
        try:
            with self._database:
                self._database.execute("INSERT INTO calls VALUES (?, ?)", (signature, time.time()))
        except sqlite3.IntegrityError:
            return False
        return True


def server_over(database: sqlite3.Connection) -> MCPServer:
    """The tools."""
    server = MCPServer("sqlite-peer", log_level="ERROR")

    def caller(context: Context) -> str:
        assert context.headers is not None
        return context.headers[agent_signing.AGENT_HEADER.lower()]

    @server.tool()
    async def discover_agents() -> dict[str, Any]:
        rows = database.execute("SELECT name, status FROM agents ORDER BY name").fetchall()
        return {"agents": [{"id": name, "status": status} for name, status in rows]}

    @server.tool()
    async def send_to_agent(
        context: Context,
        targetAgentId: str,  # noqa: N803
        message: str,
        priority: str = "normal",
    ) -> dict[str, Any]:
        if database.execute("SELECT 1 FROM agents WHERE name = ?", (targetAgentId,)).fetchone() is None:
            raise ToolError("unknown_recipient")
        made, now = str(uuid.uuid4()), time.time_ns() // 1_000_000
        row = (made, caller(context), targetAgentId, message, PRIORITIES.index(priority), now, 0)
        with database:
            database.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return {"messageId": made, "timestamp": now}

    @server.tool()
    async def get_my_messages(
        context: Context,
        unreadOnly: bool = False,  # noqa: N803
        limit: int = 100,
    ) -> dict[str, Any]:
        me = caller(context)
        rows = database.execute(
            "SELECT id, sender, content, posted_at, read, priority FROM messages WHERE recipient = ? "
            "AND read <= ? ORDER BY priority, posted_at, id LIMIT ?",
            (me, 0 if unreadOnly else 1, limit),
        ).fetchall()
        total, unread = database.execute(
            "SELECT count(*), count(*) - coalesce(sum(read), 0) FROM messages WHERE recipient = ?", (me,)
        ).fetchone()
        names = ("id", "from", "content", "timestamp", "read", "priority")
        messages = [dict(zip(names, row, strict=True)) | {"to": me} for row in rows]
        return {"messages": messages, "statistics": {"total": total, "unread": unread}}

    @server.tool()
    async def mark_read(context: Context, messageIds: list[str]) -> dict[str, Any]:  # noqa: N803
        marked = 0
        with database:
            for one in messageIds:
                change = "UPDATE messages SET read = 1 WHERE id = ? AND recipient = ? AND read = 0"
                marked += database.execute(change, (one, caller(context))).rowcount
        return {"marked": marked}

    @server.tool()
    async def update_my_status(context: Context, status: str) -> dict[str, Any]:
        with database:
            database.execute("UPDATE agents SET status = ? WHERE name = ?", (status, caller(context)))
        return {"success": True}

    return server


def main(port: str, path: str, keys: str) -> None:
    """Serve until SIGTERM, with the settings that ours gives to uvicorn."""
    database = sqlite3.connect(path, check_same_thread=False)
    database.executescript(TABLES)
    with database:
        for name, key in json.loads(Path(keys).read_text()).items():
            database.execute("INSERT INTO agents VALUES (?, ?, 'idle')", (name, key))
    app = server_over(database).streamable_http_app(stateless_http=True, json_response=True)
    uvicorn.run(
        Signed(app, database),
        host="127.0.0.1",
        port=int(port),
        http="h11",
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
