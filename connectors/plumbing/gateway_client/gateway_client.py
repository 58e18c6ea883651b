"""A client of the gateway's HTTP API. The command line and our other clients ask the gateway through it.

    with GatewayClient(settings) as gateway:
        job = gateway.post("/api/hub/jobs", {"description": "build the docs"})

It sends its requests with the client of the agents' library. Each POST carries an `Idempotency-Key`. When no
answer came and the client sends the request again, the gateway recognizes it as the same request. The gateway's
refusals become the errors of `trunkline_agent.errors`, with the gateway's own text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from connectors.plumbing.gateway_client.gateway_access import TOKEN_VARIABLE, explained, read_token, trust
from schemas.settings.settings import Settings
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import BackboneUnreachable, TrunklineError, UsageError
from trunkline_agent.hub.answer_errors import error_of, retry_after_of
from trunkline_agent.hub.hub_requests import API, IDEMPOTENCY_KEY, JSON_CONTENT, encoded, new_key, path_of
from trunkline_agent.hub.plans import Answer, Lost, Pause, Plan, Request
from trunkline_agent.hub.sync_client import HubClient
from trunkline_agent.terminal_text import escaped
from trunkline_agent.xml.sender import MEDIA_TYPE, PATH, PostedXml, is_answer, posted_of

__all__ = ["API", "CONNECT_TIMEOUT_S", "GatewayClient", "attempt", "path_of", "post_xml", "reachable"]

CONNECT_TIMEOUT_S: Final = 5.0
_ANSWER_MARGIN_S: Final = 20.0
# Pauses between the attempts of one request. A 503 may ask for a longer one, up to the last of these.
_RETRY_WAITS_S: Final = (0.2, 0.5, 1.0, 2.0)


class GatewayClient(HubClient):
    """A client of the gateway at `gateway.url`: the library's, which asks again and has advice in its errors.

    Use it as a context manager. `token` is the caller's token. None takes that of the variable TRUNKLINE_TOKEN,
    else that of the operator's token file. `answer_timeout_s` is how long to wait for a whole answer; None:
    longer than the gateway waits for a record. The constructor makes no request. It raises UsageError for an
    invalid address or token, and SettingsError for a certificate file that cannot be read.

    `get`, `post` and `request` raise UsageError (400, 413, 422), Refused (401, 403, 409, 429) or NotFound (404,
    410) with the gateway's text. They raise BackboneUnreachable when, after a few attempts, the gateway does
    not answer or answers 502, 503 or 504. Any other status raises TrunklineError. `run` and `parts` try a
    request once, and raise the library's errors.
    """

    def __init__(
        self, settings: Settings, *, token: str | None = None, answer_timeout_s: float | None = None
    ) -> None:
        self.url = settings.gateway_url
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"gateway.url: expected http://host:port, found {self.url!r}")
        self._settings, self._token_file = settings, settings.operator_token_file
        self._token = read_token(settings) if token is None else token
        self._timeout_s = settings.gateway.settle_timeout_s + _ANSWER_MARGIN_S
        trust(self.url, settings.gateway.ca_certs)  # so that a file that cannot be read is named by its setting
        super().__init__(
            HubAccess(self.url, self._token),
            settings.gateway.ca_certs,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            answer_timeout_s=self._timeout_s if answer_timeout_s is None else answer_timeout_s,
        )

    def another(self) -> GatewayClient:
        """Return another client of the same gateway, with connections of its own. The caller closes it."""
        return GatewayClient(self._settings, token=self._token)

    def get(
        self,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0,
    ) -> Any:
        """Send a GET request and return the JSON of the answer as Python values.

        Retries while there is no answer.

        Args:
            path: The path on the gateway, see `path_of`.
            parameters: The query parameters. None values are left out.
            headers: Further HTTP headers.
            wait_s: How many seconds the gateway may wait before it answers.

        Raises:
            BackboneUnreachable: After five attempts, the gateway does not answer or answers 502, 503 or 504.
            TrunklineError: The answer is not JSON or has another error status: NotFound for 404 and 410,
                Refused for 401, 403, 409 and 429, UsageError for 400, 413 and 422.
        """
        return self.request("GET", path, query=parameters, headers=headers, wait_s=wait_s).json()

    def get_all(
        self, path: str, key: str, name_of: Callable[[Any], str], parameters: Mapping[str, Any] | None = None
    ) -> Any:
        """Send GET requests until a list that is sorted by name is complete, and return it as one answer.

        Args:
            path: As of `get`, which says what is raised.
            key: The field of the answer that has the rows.
            name_of: Returns the name of a row, after which the next answer begins.
            parameters: As of `get`.
        """
        answer = self.get(path, parameters)
        rows = answer[key]
        while answer.get("left") and answer[key]:
            answer = self.get(path, {**(parameters or {}), "after": name_of(rows[-1])})
            rows += answer[key]
        return {**answer, key: rows}

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        wait_s: float = 0,
    ) -> Any:
        """Send a POST request and return the JSON of the answer as Python values.

        Retries while there is no answer.

        Args:
            path: The path on the gateway, see `path_of`.
            body: The fields of the JSON body. None values are left out.
            request_id: The idempotency key: the same id is the same request, without a time limit. None makes a
                new one.
            parameters: The query parameters.
            wait_s: How many seconds the gateway may wait before it answers.

        Raises:
            BackboneUnreachable: After five attempts, the gateway does not answer or answers 502, 503 or 504. It
                may have carried out the request even so.
            TrunklineError: The answer is not JSON or has another error status: NotFound for 404 and 410,
                Refused for 401, 403, 409 and 429, UsageError for 400, 413 and 422.
        """
        wanted = {name: value for name, value in (body or {}).items() if value is not None}
        key = {IDEMPOTENCY_KEY: request_id or new_key()}
        return self.request("POST", path, query=parameters, body=wanted, headers=key, wait_s=wait_s).json()

    def answers(self) -> bool:
        """Return whether the gateway answers a request to `/healthz`. Makes one attempt, of about 5 s at most.

        Any HTTP status counts as an answer.
        """
        try:
            self.check()
        except BackboneUnreachable:
            return False
        return True

    def check(self) -> None:
        """Raise BackboneUnreachable when the gateway does not answer `/healthz`; return nothing otherwise.

        Makes one attempt, of about 5 s at most. Any HTTP status counts as an answer.
        """
        outcome = self.run(attempt(Request("GET", "/healthz")))
        if isinstance(outcome, Lost):
            raise self.unreachable(outcome.cause or outcome.why)

    def request(
        self,
        method: str,
        path: str,
        is_answer: Callable[[Answer], bool] = lambda answer: answer.is_success,
        *,
        query: Mapping[str, Any] | None = None,
        body: bytes | Mapping[str, Any] = b"",
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0,
    ) -> Answer:
        """Send a request and return the gateway's answer. Retry while the gateway does not answer.

        Makes up to five attempts, with pauses of 0.2 s to 2 s. An answer 502, 503 or 504 is also tried again.
        No new attempt begins when `wait_s`, `gateway.settle_timeout_s` and another 20 s are over.

        Args:
            method: The HTTP method.
            path: The path on the gateway.
            is_answer: Returns whether to return an answer. For any other answer the error of its status is
                raised.
            query: The query parameters. None values are left out.
            body: The bytes of the body, or the fields of a JSON object.
            headers: Further HTTP headers.
            wait_s: How many seconds the gateway may wait before it answers.

        Raises:
            BackboneUnreachable: The last attempt had no answer, or 502, 503 or 504.
            TrunklineError: The answer has another error status: NotFound for 404 and 410, Refused for 401, 403,
                409 and 429, UsageError for 400, 413 and 422.
        """
        found = dict(headers or {})
        if not isinstance(body, bytes):
            body = encoded(body)
            found["Content-Type"] = JSON_CONTENT
        return self.run(self._attempts(Request(method, path, query, found, body, wait_s), is_answer))

    def _attempts(self, request: Request, is_answer: Callable[[Answer], bool]) -> Plan[Answer]:
        # All attempts together take little longer than one attempt may.
        deadline = time.monotonic() + self._timeout_s + request.wait_s
        for pause_s in (*_RETRY_WAITS_S, None):
            outcome: Answer | Lost = yield request
            if isinstance(outcome, Lost):
                problem: TrunklineError = self.unreachable(outcome.cause or outcome.why)
            elif is_answer(outcome):
                return outcome
            else:
                problem = self.error_of(outcome.status, outcome.headers, outcome.body)
                if outcome.status == 503 and pause_s is not None:
                    pause_s = max(pause_s, min(retry_after_of(outcome), _RETRY_WAITS_S[-1]))
            if pause_s is None or not isinstance(problem, BackboneUnreachable) or time.monotonic() > deadline:
                raise problem
            yield Pause(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def unreachable(self, error: Exception | str) -> BackboneUnreachable:
        """Return an error, for the caller to raise: the gateway does not answer, and how to start it.

        `error` is the cause, whose text becomes part of the message.
        """
        why = explained(error)
        return BackboneUnreachable(
            f"the gateway at {self.url} does not answer ({escaped(why)}). 'trunkline up' starts it, "
            "'trunkline doctor' says what is down; elsewhere set TRUNKLINE__GATEWAY__URL"
        )

    def error_of(self, status: int, headers: Mapping[str, str], body: bytes) -> TrunklineError:
        """Return the error, for the caller to raise, that belongs to the HTTP status of an answer.

        It is that of the library, with advice for the users of this stack.
        """
        error = error_of(status, headers, body)
        if status == 401:
            error.advice = f"a token comes from {TOKEN_VARIABLE}, else from {self._token_file}"
        return error


@contextmanager
def reachable(settings: Settings) -> Iterator[GatewayClient]:
    """Check that the gateway answers, yield a client of it, and close the client at the end.

    Use it with `with`. Raises BackboneUnreachable when the gateway does not answer within about 5 s, and
    UsageError for an invalid address or token in the settings.
    """
    with GatewayClient(settings) as client:
        client.check()
        yield client


def attempt(request: Request) -> Plan[Answer | Lost]:
    """Send a request once, and return what came of it."""
    outcome: Answer | Lost = yield request
    return outcome


def post_xml(
    gateway: GatewayClient,
    document: bytes,
    *,
    sender: str | None = None,
    request_id: str,
    sent: Mapping[str, Any] | None = None,
) -> PostedXml:
    """Post an XML document to the hub and return the hub's answer. Retries while the hub does not answer.

    A result whose `huh` is not None means that the message was not accepted.

    Args:
        gateway: The client to send with.
        document: The envelope with its payload, as bytes.
        sender: The human listener in whose name the operator writes; None for the operator's own name.
        request_id: The idempotency key. Another call with the same key sends the same message, so it has no
            further effect.
        sent: The query parameters `priority`, `expires_in_s` and `deliver_after_s`, those that are given.

    Raises:
        Refused: Too many messages wait, or the token is not accepted.
        BackboneUnreachable: The hub does not answer after a few attempts.
        TrunklineError: Any other error status of the hub.
    """
    answer = gateway.request(
        "POST",
        PATH,
        _is_xml,
        body=document,
        headers={"Content-Type": MEDIA_TYPE, "Idempotency-Key": request_id},
        query={**(sent or {}), **({} if sender is None else {"as": sender})},
    )
    return posted_of(answer.status, answer.body)


def _is_xml(answer: Answer) -> bool:
    return is_answer(answer.status, answer.headers.get("content-type", ""))
