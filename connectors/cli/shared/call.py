"""One call of a command: its arguments, its requests to the gateway, and its output as text or JSON."""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from connectors.cli.shared.text_table import aligned, print_json
from schemas.errors import BackboneUnreachable, NotFound

if TYPE_CHECKING:
    from connectors.gateway_client.gateway_client import GatewayClient
    from schemas.settings.settings import Settings

Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[Row], object]]
"""Headings of a table; each with a field of a row, or a function that makes the cell of a row."""


class Call(argparse.Namespace):
    """The arguments of one call, and the settings. Each request raises what `GatewayClient` raises."""

    settings: Settings

    def gateway(self) -> GatewayClient:
        """Return a new client of the gateway."""
        # Imported here, because it is slow to import and help must be quick.
        from connectors.gateway_client.gateway_client import GatewayClient

        return GatewayClient(self.settings)

    def get(self, *path: str, **parameters: object) -> Any:
        """Return the decoded answer to a GET of `path`. Parameters that are None are left out."""
        from connectors.gateway_client.gateway_client import path_of

        with self.gateway() as gateway:
            return gateway.get(path_of(*path), parameters)

    def post(self, *path: str, request_id: str | None = None, **body: object) -> Any:
        """Return the decoded answer to a POST to `path`. Fields that are None are left out.

        Requests with the same `request_id` are one request; None makes a new one.
        """
        from connectors.gateway_client.gateway_client import path_of

        with self.gateway() as gateway:
            return gateway.post(path_of(*path), body, request_id=request_id)

    def post_named(self, *path: str, possible_effect: str, **body: object) -> Row:
        """Post as the request that `--request-id` names, and return the answer with `request_id`.

        For `possible_effect` see `named_request`.
        """
        with self.named_request(possible_effect) as request_id:
            return {**self.post(*path, request_id=request_id, **body), "request_id": request_id}

    @contextmanager
    def named_request(self, possible_effect: str) -> Iterator[str]:
        """Yield the name of a request: that of `--request-id`, or a new one.

        When no answer comes, the request may have been done or not. Then stderr says how to send the same
        request again; `possible_effect` names what may have happened, such as "the message was delivered".
        """
        name: str = self.request_id or str(uuid.uuid4())
        try:
            yield name
        except (BackboneUnreachable, KeyboardInterrupt):
            again = f"send the same request again: --request-id {name}"
            print(f"No answer came. In case {possible_effect}, {again}", file=sys.stderr, flush=True)
            raise

    def print_answer(self, answer: object, *lines: str) -> int:
        """Print the answer as JSON with `--json`, else the lines. Return exit code 0."""
        if self.json:
            print_json(answer)
        else:
            print("\n".join(lines))
        return 0

    def print_rows(self, found: Mapping[str, Any], key: str, columns: Columns) -> int:
        """Print the rows `found[key]` as a table, or `found` as JSON. Return exit code 0.

        Raises NotFound for an empty table. JSON of an empty list is no error.
        """
        if self.json:
            return self.print_answer(found)
        rows = found[key]
        if not rows:
            raise NotFound(f"there are no such {key}")
        cells = [
            [row[cell] if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows
        ]
        print(aligned(list(columns), cells))
        if "limit" in self and found.get("total", 0) > len(rows):
            print(f"{len(rows)} of {found['total']}; --limit shows more", file=sys.stderr)
        return 0
