"""One call of a command: its arguments, its requests to the gateway, and its output as text or JSON."""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from connectors.cli.shared.text_output import CELL_LIMIT, aligned, print_json
from trunkline_agent.errors import BackboneUnreachable, NotFound

if TYPE_CHECKING:
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient
    from schemas.settings.settings import Settings

Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[Row], object]]
"""Headings of a table; each with a field of a row, or a function that makes the cell of a row."""


class Call(argparse.Namespace):
    """The parsed arguments of one command line, the settings, and methods for requests and output.

    Each argument is an attribute. The command line's `main` prints a TrunklineError that a method raises, and
    ends the process with its exit code.
    """

    settings: Settings

    def gateway(self) -> GatewayClient:
        """Return a new client of the gateway, which the caller closes (`with`). Nothing is sent yet.

        Raises UsageError if the setting `gateway.url` is no HTTP address.
        """
        # Imported here, because it is slow to import and help must be quick.
        from connectors.plumbing.gateway_client.gateway_client import GatewayClient

        return GatewayClient(self.settings)

    def get(self, *path: str, **parameters: object) -> Any:
        """Send a GET request to the gateway and return the decoded JSON answer.

        Without an answer, or with status 502, 503 or 504, the request is tried again: five attempts at most,
        and none after `gateway.settle_timeout_s` + 20 s.

        Args:
            path: The parts of the path below `/api/hub/`, such as `"jobs", job_id`.
            parameters: The query parameters. None leaves one out.

        Raises:
            BackboneUnreachable: The gateway does not answer, or answered 502, 503 or 504 to the last attempt.
            UsageError: Status 400, 413 or 422.
            Refused: Status 401, 403 or 409, or the gateway could not start an agent's program.
            NotFound: Status 404.
            TrunklineError: Any other error status, or an answer that is no JSON.
        """
        from connectors.plumbing.gateway_client.gateway_client import path_of

        with self.gateway() as gateway:
            return gateway.get(path_of(*path), parameters)

    def get_all(self, *path: str, key: str, name: str, **parameters: object) -> Any:
        """Send GET requests until a list that is sorted by name is complete. Retries and raises as `get`.

        Args:
            path: The parts of the path below `/api/hub/`.
            key: The field of the answer that has the rows.
            name: The field of a row that has its name, or several, joined by slashes as in the name.
            parameters: As of `get`.
        """
        from connectors.plumbing.gateway_client.gateway_client import path_of

        with self.gateway() as gateway:
            fields = name.split("/")
            return gateway.get_all(
                path_of(*path), key, lambda row: "/".join(row[one] for one in fields), parameters
            )

    def post(self, *path: str, request_id: str | None = None, **body: object) -> Any:
        """Send a POST request to the gateway and return the decoded JSON answer. Retries and raises as `get`.

        Args:
            path: The parts of the path below `/api/hub/`, such as `"jobs", job_id, "cancel"`.
            request_id: The idempotency key. Requests with the same one take effect once. None makes a new one.
            body: The fields of the JSON body. None leaves one out.
        """
        from connectors.plumbing.gateway_client.gateway_client import path_of

        with self.gateway() as gateway:
            return gateway.post(path_of(*path), body, request_id=request_id)

    def post_named(self, *path: str, possible_effect: str, **body: object) -> Row:
        """Send a POST request under the id of the option `--request-id`, or a new id, and return the answer.

        The returned answer also has the field `request_id`. If no answer comes, a note on stderr says how to
        repeat the request, and BackboneUnreachable is raised. For the other errors see `get`.

        Args:
            path: The parts of the path below `/api/hub/`.
            possible_effect: The part of the note about the effect that the request may have had, such as "the
                message was delivered".
            body: The fields of the JSON body. None leaves one out.
        """
        with self.named_request(possible_effect) as request_id:
            return {**self.post(*path, request_id=request_id, **body), "request_id": request_id}

    @contextmanager
    def named_request(self, possible_effect: str) -> Iterator[str]:
        """Yield the id for a request in the `with` block: that of the option `--request-id`, or a new one.

        If the block raises BackboneUnreachable or KeyboardInterrupt, the request may have been carried out or
        not. Then a note on stderr says how to repeat the request, and the error is raised again.
        `possible_effect` is the part of the note about the effect that the request may have had, such as "the
        message was delivered".
        """
        name: str = self.request_id or str(uuid.uuid4())
        try:
            yield name
        except (BackboneUnreachable, KeyboardInterrupt):
            again = f"send the same request again: --request-id {name}"
            print(f"No answer came. In case {possible_effect}, {again}", file=sys.stderr, flush=True)
            raise

    def print_answer(self, answer: object, *lines: str) -> int:
        """Print `answer` as JSON if the option `--json` was given, else print `lines`. Return 0."""
        if self.json:
            print_json(answer)
        else:
            print("\n".join(lines))
        return 0

    def print_rows(
        self, found: Mapping[str, Any], key: str, columns: Columns, cell_limit: int = CELL_LIMIT
    ) -> int:
        """Print rows of a gateway's answer as a table, or the whole answer as JSON with `--json`. Return 0.

        Args:
            found: The answer.
            key: The field of the answer that has the rows, such as `jobs`.
            columns: The columns of the table.
            cell_limit: The largest number of characters of a cell. A longer one is cut.

        Raises:
            NotFound: There are no rows. With `--json`, an empty list is printed instead.
        """
        if self.json:
            return self.print_answer(found)
        rows = found[key]
        if not rows:
            raise NotFound(f"there are no such {key}")
        cells = [
            [row[cell] if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows
        ]
        print(aligned(list(columns), cells, cell_limit))
        if "limit" in self and found.get("total", 0) > len(rows):
            print(f"{len(rows)} of {found['total']}; --limit shows more", file=sys.stderr)
        return 0
