"""uvicorn's HTTP, which lets an application cut a connection off.

What was written to a client that does not read would else be kept until that client goes.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

# In an ASGI scope: a function that ends the connection at once, whatever is still to be sent.
ABORT: Final = "trunkline_abort"


class AbortableHttp(H11Protocol):
    """One connection; each request's scope has ABORT."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        served: Any = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope[ABORT] = transport.abort
            await served(scope, receive, send)

        self.app = app
