"""A small client of the gateway's HTTP API: what the command line asks for goes through here.

    with GatewayClient(settings) as gateway:
        job = gateway.post("/api/hub/jobs", {"description": "build the docs"})

Each POST carries an `Idempotency-Key`, so that a request that is sent again, because no answer came, is the
same request. The gateway's refusals become the errors of `schemas.errors`, with its own words.
"""

from __future__ import annotations

import os
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote, urlsplit

from connectors.gateway_client.gateway_tls import explained, trust
from connectors.terminal.terminal_text import escaped
from schemas.errors import BackboneUnreachable, NotFound, Refused, TrunklineError, UsageError
from schemas.settings.settings import Settings

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE: Final = "TRUNKLINE_TOKEN"  # noqa: S105  a variable's name
API: Final = "/api/hub"
# The reason of a 502 that is the agent's fault and not the way's.
LAUNCH_FAILED: Final = "launch_failed"
CONNECT_TIMEOUT_S: Final = 5.0
_ANSWER_MARGIN_S: Final = 20.0
# Waits between the attempts of one request; 503 may ask for a longer one, up to the last.
_RETRY_WAITS_S: Final = (0.2, 0.5, 1.0, 2.0)
_MESSAGE_LIMIT: Final = 600
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def read_token(settings: Settings) -> str | None:
    """The bearer token: from TRUNKLINE_TOKEN, else the operator's from its 0600 file, else None.

    Raises UsageError for a file that others can read, or for what cannot be a token.
    """
    found = os.environ.get(TOKEN_VARIABLE, "").strip()
    where = TOKEN_VARIABLE
    if not found:
        file = settings.operator_token_file
        where = str(file)
        try:
            if stat.S_IMODE(file.stat().st_mode) & 0o077:
                raise UsageError(f"{file} is readable by others; run: chmod 600 {file}")
            found = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the token in {file}: {type(error).__name__}") from None
    if not found.isascii() or not found.isprintable() or " " in found:
        raise UsageError(f"what {where} holds is no token")
    return found or None


class GatewayClient:
    """Asks the gateway that the settings name. Not thread-safe; use it as a context manager.

    Every call raises UsageError (400, 413), Refused (401, 403, 409), NotFound (404) with the gateway's
    words, BackboneUnreachable when it does not answer or Kafka is away (503), after a few attempts.
    """

    def __init__(self, settings: Settings, *, token: str | None = None) -> None:
        self.url = settings.gateway_url
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"gateway.url: expected http://host:port, found {self.url!r}")
        self._ca_certs = settings.gateway.ca_certs
        self._token_file = settings.operator_token_file
        self._token = read_token(settings) if token is None else token
        # A proxy of the environment has no business between us and our own machine.
        self._trust_env = parts.hostname not in _LOOPBACK
        self._timeout_s = settings.gateway.settle_timeout_s + _ANSWER_MARGIN_S
        self._http: httpx.Client = self.connection(self._timeout_s)

    def connection(self, timeout_s: float) -> httpx.Client:
        """A fresh httpx client that knows the address and the token."""
        import httpx

        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        return httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            trust_env=self._trust_env,
            verify=trust(self.url, self._ca_certs) or False,
        )

    def get(
        self,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The decoded answer to a GET; parameters that are None are left out."""
        wanted = {name: value for name, value in (parameters or {}).items() if value is not None}
        return self._ask("GET", path, params=wanted, headers=headers)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, request_id: str | None = None) -> Any:
        """The decoded answer to a POST; fields that are None are left out. The same `request_id` again is
        the same request, for ever; None: one of its own.
        """
        wanted = {name: value for name, value in (body or {}).items() if value is not None}
        key = {"Idempotency-Key": request_id or str(uuid.uuid4())}
        return self._ask("POST", path, json=wanted, headers=key)

    def answers(self) -> bool:
        """Whether a gateway is there, asked once."""
        try:
            self.check()
        except BackboneUnreachable:
            return False
        return True

    def check(self) -> None:
        """Raise BackboneUnreachable when no gateway is there: for those who then wait for it for long."""
        import httpx

        try:
            self._http.get("/healthz", timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None

    def close(self) -> None:
        """End its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, path: str, **request: Any) -> Any:
        import httpx

        # All attempts together take little longer than one may.
        deadline = time.monotonic() + self._timeout_s
        for wait_s in (*_RETRY_WAITS_S, None):
            try:
                answer = self._http.request(method, path, **request)
            except UnicodeEncodeError:
                raise UsageError("what goes into a header, as a request id does, must be ASCII") from None
            except (httpx.TransportError, httpx.InvalidURL) as error:
                problem: TrunklineError = self.unreachable(error)
            else:
                if answer.is_success:
                    return self._decoded(answer)
                problem = self.error_of(answer)
                if answer.status_code == 503 and wait_s is not None:
                    wait_s = max(wait_s, min(_retry_after_s(answer), _RETRY_WAITS_S[-1]))
            if wait_s is None or not isinstance(problem, BackboneUnreachable) or time.monotonic() > deadline:
                raise problem
            time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _decoded(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise TrunklineError(f"what answers at {self.url} is no gateway of Trunkline's") from None

    def unreachable(self, error: Exception | str) -> BackboneUnreachable:
        """The error for a gateway that does not answer."""
        why = explained(error)
        return BackboneUnreachable(
            f"the gateway at {self.url} does not answer ({escaped(why)}). 'trunkline up' starts it, "
            "'trunkline doctor' says what is down; elsewhere set TRUNKLINE__GATEWAY__URL"
        )

    def error_of(self, answer: httpx.Response) -> TrunklineError:
        """The error that an answer's status stands for; its body must have been read."""
        said = _message(answer)
        status = answer.status_code
        if status == 401:
            hint = f"a token comes from {TOKEN_VARIABLE}, else from {self._token_file}"
            return Refused(f"{said}; {hint}")
        if status in (403, 409) or (status == 502 and LAUNCH_FAILED in said):
            return Refused(said)
        if status == 404:
            return NotFound(said)
        if status in (400, 413, 422):
            return UsageError(said)
        if status in (502, 503, 504):
            return BackboneUnreachable(f"{said}; 'trunkline doctor' says what is down")
        return TrunklineError(f"the gateway answered {status}: {said}")


@contextmanager
def reachable(settings: Settings) -> Iterator[GatewayClient]:
    """A client of a gateway that answers now. Raises BackboneUnreachable."""
    with GatewayClient(settings) as client:
        client.check()
        yield client


def path_of(*parts: str) -> str:
    """A path of the API, each part quoted: `path_of("jobs", job_id)`."""
    return "/".join((API, *(quote(part, safe="") for part in parts)))


def _message(answer: httpx.Response) -> str:
    """What the gateway says, as one line that a terminal may show."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return f"HTTP status {answer.status_code}"
    reason, text = body.get("reason"), body.get("message")
    if not isinstance(text, str) or not text:
        text = f"HTTP status {answer.status_code}"
    said = f"{text} ({reason})" if isinstance(reason, str) and reason not in text else text
    return escaped(said)[:_MESSAGE_LIMIT]


def _retry_after_s(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0
