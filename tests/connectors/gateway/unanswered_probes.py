"""A gateway to whose probes no client's machine answers, as when the link of each has gone without a word."""

from __future__ import annotations

import runpy
import socket

from connectors.gateway.web import bounded_http


async def no_answer(connection: socket.socket) -> bool:
    """Stand for the probe of a connection."""
    return False


if __name__ == "__main__":
    bounded_http.peer_answers = no_answer
    runpy.run_module("connectors.gateway_program", run_name="__main__", alter_sys=True)
