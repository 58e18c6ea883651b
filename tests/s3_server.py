"""An S3 server on loopback for the tests, as a process of its own (moto), which fails as it is told.

    with s3_server(folder) as store: …      # store.url, store.environment, store.fail(refused=0.1)

It keeps its objects in memory, and knows conditional puts.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from connectors.programs.local_stack import free_port
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import LOOPBACK, accepts, wait_until

_CONTROL = "/_control"
_DATE = re.compile(rb"(?<=<LastModified>)[^<]+")


class FailingStore:
    """The WSGI application: S3 with faults. All but the last two are shares of the requests, from 0 to 1.

    refused: 503 before anything is done. lost: the request is done, and its answer is 500. conflict: 409 to a
    conditional put, which is not done. unconditional: the condition of a put is ignored. unlisted: a list is
    empty. unchecked: a put without a checksum is refused, as a bucket with object lock does. delay_s: the
    longest pause before a request. ahead_s: how far the server's clock is ahead in lists.
    """

    def __init__(self, seed: int) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._s3 = DomainDispatcherApplication(create_backend_app)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._faults: dict[str, float] = {}
        self._given: dict[str, int] = {}

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        if environ["PATH_INFO"] == _CONTROL:
            return self._control(environ, start)
        time.sleep(self._random.random() * self._faults.get("delay_s", 0.0))
        if self._happens("refused"):
            return _answer(start, "503 Slow Down", b"<Error><Code>SlowDown</Code></Error>")
        has_checksum = "HTTP_CONTENT_MD5" in environ or any("HTTP_X_AMZ_CHECKSUM_" in name for name in environ)
        if environ["REQUEST_METHOD"] == "PUT" and not has_checksum and self._happens("unchecked"):
            return _answer(start, "400 Bad Request", b"<Error><Code>InvalidRequest</Code></Error>")
        if "HTTP_IF_NONE_MATCH" in environ:
            if self._happens("conflict"):
                why = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
                return _answer(start, "409 Conflict", why)
            if self._happens("unconditional"):
                del environ["HTTP_IF_NONE_MATCH"]
        if "list-type" in environ["QUERY_STRING"]:
            if self._happens("unlisted"):
                return _answer(
                    start, "200 OK", b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
                )
            return [_DATE.sub(self._moved, part) for part in self._s3(environ, start)]
        if self._happens("lost"):
            b"".join(self._s3(environ, lambda *_: None))
            return _answer(start, "500 Internal Server Error", b"<Error><Code>InternalError</Code></Error>")
        done: Iterable[bytes] = self._s3(environ, start)
        return done

    def _happens(self, fault: str) -> bool:
        with self._lock:
            happens = self._random.random() < self._faults.get(fault, 0.0)
            if happens:
                self._given[fault] = self._given.get(fault, 0) + 1
            return happens

    def _moved(self, found: re.Match[bytes]) -> bytes:
        moved = datetime.fromisoformat(found[0].decode()) + timedelta(seconds=self._faults.get("ahead_s", 0.0))
        return moved.strftime("%Y-%m-%dT%H:%M:%S.000Z").encode()

    def _control(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self._lock:
            given = self._given
            self._faults, self._given = faults, {}
        return _answer(start, "200 OK", json.dumps(given).encode())


def _answer(start: Callable[..., Any], status: str, body: bytes) -> Iterable[bytes]:
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


@dataclass(frozen=True)
class ObjectStore:
    """The running server, and an empty bucket of it."""

    url: str
    bucket: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The usual variables of the login, by which each client finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
        }

    def with_bucket(self) -> ObjectStore:
        """The same server with a new bucket, and without faults."""
        made = replace(self, bucket=f"test-{uuid.uuid4().hex}")
        made.fail()
        httpx.put(f"{self.url}/{made.bucket}").raise_for_status()
        return made

    def fail(self, **faults: float) -> dict[str, int]:
        """Set the faults, and return how often each happened since the last call."""
        found: dict[str, int] = httpx.post(self.url + _CONTROL, json=faults).raise_for_status().json()
        return found


@contextmanager
def s3_server(folder: Path, seed: int = 1) -> Iterator[ObjectStore]:
    """Run the server, without a bucket."""
    port = free_port()
    command = [sys.executable, "-m", "tests.s3_server", str(port), str(seed)]
    with (folder / "s3.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=PROJECT_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: accepts(port), 30, "the S3 server answers")
        yield ObjectStore(f"http://{LOOPBACK}:{port}")
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    from werkzeug.serving import run_simple

    run_simple(LOOPBACK, int(sys.argv[1]), FailingStore(int(sys.argv[2])), threaded=True)
