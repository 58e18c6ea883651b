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
    """The parsed arguments of one command line, the settings, and methods for requests and output.

    Each argument is an attribute. The requests raise TrunklineError: BackboneUnreachable if the gateway does
    not answer, Refused, NotFound or UsageError if it refuses the request.
    """

    settings: Settings

    def gateway(self) -> GatewayClient:
        """Return a new client of the gateway, which the caller closes (`with`)."""
        # Imported here, because it is slow to import and help must be quick.
        from connectors.gateway_client.gateway_client import GatewayClient

        return GatewayClient(self.settings)

    def get(self, *path: str, **parameters: object) -> Any:
        """Send a GET request to the gateway and return the decoded JSON answer.

        `path` are the parts of the path below `/api/hub/`. Parameters that are None are left out.
        """
        from connectors.gateway_client.gateway_client import path_of

        with self.gateway() as gateway:
            return gateway.get(path_of(*path), parameters)

    def post(self, *path: str, request_id: str | None = None, **body: object) -> Any:
        """Send a POST request to the gateway and return the decoded JSON answer.

        `path` are the parts of the path below `/api/hub/`. `body` are the fields of the JSON body; None leaves
        a field out. Requests with the same `request_id` take effect once. None makes a new id.
        """
        from connectors.gateway_client.gateway_client import path_of

        with self.gateway() as gateway:
            return gateway.post(path_of(*path), body, request_id=request_id)

    def post_named(self, *path: str, possible_effect: str, **body: object) -> Row:
        """Send a POST request under the id of `--request-id`, or a new id, and return the answer.

        The answer also has the field `request_id`. If no answer comes, a note on stderr says how to repeat the
        request. `possible_effect` is its text about the effect that the request may have had, such as "the
        message was delivered".
        """
        with self.named_request(possible_effect) as request_id:
            return {**self.post(*path, request_id=request_id, **body), "request_id": request_id}

    @contextmanager
    def named_request(self, possible_effect: str) -> Iterator[str]:
        """Yield the id for a request in the `with` block: that of `--request-id`, or a new one.

        If the block raises BackboneUnreachable or is interrupted, the request may have been carried out or not.
        Then a note on stderr says how to repeat it. `possible_effect` is its text about the effect that the
        request may have had, such as "the message was delivered".
        """
        name: str = self.request_id or str(uuid.uuid4())
        try:
            yield name
        except (BackboneUnreachable, KeyboardInterrupt):
            again = f"send the same request again: --request-id {name}"
            print(f"No answer came. In case {possible_effect}, {again}", file=sys.stderr, flush=True)
            raise

    def print_answer(self, answer: object, *lines: str) -> int:
        """Print `answer` as JSON if the command has `--json`, else print `lines`. Return the exit code 0."""
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
