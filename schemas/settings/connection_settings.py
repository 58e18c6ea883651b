"""The settings of connections: how many the gateway's listeners take, and how long a client may take."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ConnectionSettings(BaseModel):
    """Bounds of the gateway's listeners, part of its section.

    `anonymous_connections` bounds connections without an admitted request, `connections` those with one; both
    count for all TCP listeners of a gateway together. `head_timeout_s`: from the connection's start, or from
    the first byte of a later request, to the end of the head, TLS handshake included. `body_timeout_s`: from
    there to the end of the body. `idle_timeout_s`: between two requests of an authenticated connection.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    anonymous_connections: int = Field(default=256, ge=8, le=100_000)
    connections: int = Field(default=2000, ge=8, le=100_000)
    head_timeout_s: float = Field(default=10.0, gt=0)
    body_timeout_s: float = Field(default=30.0, gt=0)
    # Longer than clients keep an idle connection, so that they close it and never meet a closed one.
    idle_timeout_s: int = Field(default=75, ge=1)
