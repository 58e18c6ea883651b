"""A program that calls a tool once, with its arguments' address and key, when a line comes."""

import sys

import anyio

from trunkline_agent.mcp import agent_client


async def main() -> None:
    """Connect, say so, wait for the line, and call."""
    async with agent_client(sys.argv[1], "ann", sys.argv[2]) as client:
        print("ready", flush=True)
        sys.stdin.readline()
        await client.call_tool("send_to_agent", {"targetAgentId": "bo", "message": "hi"})


if __name__ == "__main__":
    anyio.run(main)
