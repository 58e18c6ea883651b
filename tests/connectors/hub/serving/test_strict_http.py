"""Malformed, oversized, ambiguous and unusual requests on a real socket, and their answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from connectors.hub.serving.strict_http import HEAD_BYTES
from tests.connectors.doors.http_api.served_application import (
    CHUNKED,
    HOST,
    LAST,
    Served,
    get,
    post,
    rest,
    served,
    statuses,
)

pytestmark = pytest.mark.requirement("ST-42")


class Recorder:
    """An application that notes each request and answers with the body that it got."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes, dict[bytes, bytes]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", scope["path"] != "/early"
        while more:
            part = await receive()
            if part["type"] != "http.request":
                return
            body, more = body + part["body"], part["more_body"]
        self.requests.append((scope["path"], body, dict(scope["headers"])))
        status = int(scope["path"][1:]) if scope["path"] in ("/204", "/304") else 200
        has_length = status == 200 and scope["path"] != "/open"
        length = [(b"content-length", str(len(body) + 3).encode())] if has_length else []
        await send({"type": "http.response.start", "status": status, "headers": length})
        await send({"type": "http.response.body", "body": b"<" + body + b"/>" if status == 200 else b""})


APP = Recorder()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(APP) as found:
        yield found


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    APP.requests.clear()
    with caplog.at_level(logging.WARNING):
        yield
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


REFUSED: dict[str, bytes | tuple[int, bytes]] = {
    "no host": get(host=b""),
    "two hosts": get(HOST.strip()),
    "a version that is not spoken": get(line=b"GET /first HTTP/1.2"),
    "HTTP/2": get(line=b"GET /first HTTP/2.0"),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /first\r\n\r\n",
    "RTSP": get(line=b"GET /first RTSP/1.0"),
    "ICE": get(line=b"SOURCE /first ICE/1.0"),
    "a method that does not exist": get(line=b"FOO /first HTTP/1.1"),
    "a method in lower case": get(line=b"get /first HTTP/1.1"),
    "a method with a separator": get(line=b"G@T /first HTTP/1.1"),
    "CONNECT": (501, get(line=b"CONNECT first:443 HTTP/1.1")),
    "two empty lines first": b"\r\n\r\n" + get(),
    "a bare CR first": b"\r" + get(),
    "a bare LF first": b"\n" + get(),
    "a space first": b" " + get(),
    "TLS at once": b"\x16\x03\x01\x02\x00\x01",
    "lines that end with LF": get().replace(b"\r\n", b"\n"),
    "lines that end with LF at once": get().replace(b"\r\n", b"\n"),
    "one line that ends with LF": get(b"X: 1\nY: 2"),
    "one line that ends with CR": get(b"X: 1\rY: 2"),
    "a folded line": get(b"X: 1\r\n 2"),
    "a folded first line": get(b"X: 1", host=b" Y: 2\r\nHost: a\r\n"),
    "a space in a name": get(b"X Y: 1"),
    "a space after a name": get(b"X : 1"),
    "an empty name": get(b": 1"),
    "NUL in a name": get(b"X\0: 1"),
    "a name that is not ASCII": get(b"X\xe9: 1"),
    "a line without colon": get(b"X"),
    "NUL in a value": get(b"X: 1\x002"),
    "a control character in a value": get(b"X: 1\x012"),
    "DEL in a value": get(b"X: 1\x7f2"),
    "NUL in the path": get(line=b"GET /first\0 HTTP/1.1"),
    "a path that is not ASCII": get(line=b"GET /first\xc3\xa9 HTTP/1.1"),
    "DEL in the path": get(line=b"GET /first\x7f HTTP/1.1"),
    "a space in the path": get(line=b"GET /first /second HTTP/1.1"),
    "two spaces before the path": get(line=b"GET  /first HTTP/1.1"),
    "two spaces before the version": get(line=b"GET /first  HTTP/1.1"),
    "a path without slash": get(line=b"GET first HTTP/1.1"),
    "an absolute target of another scheme": get(line=b"GET ftp://b/first HTTP/1.1"),
    "an absolute target with a user": get(line=b"GET http://a@b/first HTTP/1.1"),
    "an absolute target without a host": get(line=b"GET http:///first HTTP/1.1"),
    "an absolute target and no Host": get(line=b"GET http://b/first HTTP/1.1", host=b""),
    "two equal lengths": post(b"Content-Length: 4", b"Content-Length: 4"),
    "two lengths": post(b"Content-Length: 4", b"Content-Length: 5"),
    "a list of lengths": post(b"Content-Length: 4, 4"),
    "a length with plus": post(b"Content-Length: +4"),
    "a length with minus": post(b"Content-Length: -4"),
    "a length with underscore": post(b"Content-Length: 0_4"),
    "a length with a space": post(b"Content-Length: 4 4"),
    "a length in hex": post(b"Content-Length: 0x4"),
    "no length": post(b"Content-Length:"),
    "a length that no integer holds": post(b"Content-Length: " + b"9" * 24),
    "a length with too many digits": post(b"Content-Length: " + b"0" * 19 + b"4"),
    "a length that int() refuses": post(b"Content-Length: " + b"0" * 5000 + b"4"),
    "length and chunks": post(b"Content-Length: 4", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunks and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 4", body=b"0\r\n\r\n"),
    "chunks twice": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "gzip in chunks": (501, post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n")),
    "chunks in gzip": post(b"Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n"),
    "another coding": post(b"Transfer-Encoding: identity", body=b"0\r\n\r\n"),
    "a coding that ends like chunks": post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "a coding after a control character": post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "chunks in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
    "a size that is no number": CHUNKED + b"xyz\r\nbody\r\n0\r\n\r\n",
    "a size with minus": CHUNKED + b"-4\r\nbody\r\n0\r\n\r\n",
    "a size with 0x": CHUNKED + b"0x4\r\nbody\r\n0\r\n\r\n",
    "a size that no integer holds": CHUNKED + b"1" + b"0" * 16 + b"4\r\nbody\r\n0\r\n\r\n",
    "a size with a space": CHUNKED + b"4 \r\nbody\r\n0\r\n\r\n",
    "a chunk without end": CHUNKED + b"4\r\nbodyXX0\r\n\r\n",
    "chunks whose lines end with LF": CHUNKED + b"4\nbody\n0\n\n",
    "LF in an extension": CHUNKED + b"4;\nxx\r\nbody\r\n0\r\n\r\n",
    "a length after the chunks": CHUNKED + b"4\r\nbody\r\n0\r\nContent-Length: 3\r\n\r\n",
    "a head that is too large": (431, get(b"X: " + b"1" * HEAD_BYTES)),
    "a path that is too large": (431, get(line=b"GET /" + b"1" * HEAD_BYTES + b" HTTP/1.1")),
    "a head that never ends": (431, get(b"X: " + b"1" * HEAD_BYTES)[:-2]),
    "trailers that never end": CHUNKED + b"4\r\nbody\r\n0\r\nX: " + b"1" * 3 * HEAD_BYTES,
    "trailers without number": CHUNKED + b"4\r\nbody\r\n0\r\n" + b"X: 1\r\n" * HEAD_BYTES,
    "an extension that never ends": CHUNKED + b"4;" + b"1" * 3 * HEAD_BYTES,
}


@pytest.mark.long
@pytest.mark.parametrize("piece", [0, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_or_ambiguous_request_is_refused_and_the_connection_closed(
    server: Served, name: str, piece: int
) -> None:
    case = REFUSED[name]
    status, sent = case if isinstance(case, tuple) else (400, case)
    is_all = name.endswith(("never end", "never ends", "at once"))
    found = server.exchange(sent if is_all else sent + LAST, piece if len(sent) < HEAD_BYTES else 1000)
    assert statuses(found) == [status]
    assert b"connection: close\r\n" in found
    assert APP.requests == []


SERVED: dict[str, tuple[bytes, str, bytes]] = {
    "a query": (get(line=b"GET /first?a=/b?c HTTP/1.1"), "/first", b""),
    "an encoded path": (get(line=b"GET /a%00%c3%a9 HTTP/1.1"), "/a\0é", b""),
    "odd characters": (get(line=b'GET /"<>\\^`{|} HTTP/1.1'), '/"<>\\^`{|}', b""),
    "two slashes": (get(line=b"GET //a/b HTTP/1.1"), "//a/b", b""),
    "a fragment": (get(line=b"GET /a#b HTTP/1.1"), "/a#b", b""),
    "an absolute target": (get(line=b"GET http://b/first HTTP/1.1"), "/first", b""),
    "an absolute target in capitals": (get(line=b"GET HTTP://B:1/first?x=1 HTTP/1.1"), "/first", b""),
    "an absolute target without path": (get(line=b"GET http://b HTTP/1.1"), "/", b""),
    "an absolute target with a query alone": (get(line=b"GET http://b?x=/y HTTP/1.1"), "/", b""),
    "an empty line first": (b"\r\n" + get(), "/first", b""),
    # The hub has no route of this name, so its answer is 404.
    "a target of the server": (get(line=b"OPTIONS * HTTP/1.1"), "*", b""),
    "a value that is not ASCII": (get(b"X: \xe9"), "/first", b""),
    "a largest head": (get(b"X: " + b"1" * (HEAD_BYTES - len(get(b"X: ")))), "/first", b""),
    "a length": (post(b"Content-Length: 4"), "/first", b"body"),
    "a length of none": (post(b"Content-Length: 0", body=b""), "/first", b""),
    "a length of as many digits as allowed": (post(b"Content-Length: " + b"4".zfill(19)), "/first", b"body"),
    "a length and white space": (post(b"Content-Length: \t 4 \t"), "/first", b"body"),
    "a body of GET": (get(b"Content-Length: 4") + b"body", "/first", b"body"),
    "a body like a request": (post(b"Content-Length: %d" % len(LAST), body=LAST), "/first", LAST),
    "chunks": (CHUNKED + b"4\r\nbody\r\n3\r\n\r\n\r\r\n0\r\n\r\n", "/first", b"body\r\n\r"),
    "chunks with ends": (CHUNKED + b"a\r\n\r\n\r\n\r\n\r\n0\r\r\n0\r\n\r\n", "/first", b"\r\n" * 4 + b"0\r"),
    "no chunk": (CHUNKED + b"0\r\n\r\n", "/first", b""),
    "an extension": (CHUNKED + b"4;a=b\r\nbody\r\n0\r\n\r\n", "/first", b"body"),
    "a trailer": (CHUNKED + b"4\r\nbody\r\n0\r\nAuthorization: x\r\n\r\n", "/first", b"body"),
    "chunks in capitals": (CHUNKED.replace(b"chunked", b"Chunked") + b"0\r\n\r\n", "/first", b""),
    "websocket": (get(b"Connection: Upgrade", b"Upgrade: websocket"), "/first", b""),
    "h2c": (get(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c"), "/first", b""),
    "h2c and a body": (post(b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 4"), "/first", b"body"),
    "h2c and chunks": (
        post(b"Connection: Upgrade", b"upgrade: h2c", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        "/first",
        b"",
    ),
    "an expectation nobody knows": (post(b"Expect: 200-ok", b"Content-Length: 4"), "/first", b"body"),
    "a body that nobody reads": (post(b"Content-Length: 4").replace(b"/first", b"/early"), "/early", b""),
    "no content": (get(line=b"GET /204 HTTP/1.1"), "/204", b""),
    "nothing new": (get(line=b"GET /304 HTTP/1.1"), "/304", b""),
}


@pytest.mark.parametrize("piece", [0, 3])
@pytest.mark.parametrize("name", SERVED)
def test_an_unusual_request_is_served_whole_and_the_next_one_begins_after_it(
    server: Served, name: str, piece: int
) -> None:
    sent, path, body = SERVED[name]
    found = server.exchange(sent + LAST, piece if len(sent) < HEAD_BYTES else 1000)
    assert [(one[0], one[1]) for one in APP.requests] == [(path, body), ("/last", b"")]
    assert b"authorization" not in APP.requests[0][2]
    first = int(path[1:]) if path in ("/204", "/304") else 200
    assert statuses(found) == [first, 200]
    assert found.endswith(b"</>") and (first != 200 or b"<" + body + b"/>" in found)
    assert first == 200 or (b"\r\n\r\nHTTP/1.1 200 " in found and b"chunked" not in found)


@pytest.mark.requirement("HH-24")
def test_the_host_of_an_absolute_target_replaces_the_header(server: Served) -> None:
    server.exchange(get(line=b"GET http://b:80/first?x=1 HTTP/1.1") + LAST)
    assert [one[2][b"host"] for one in APP.requests] == [b"b:80", b"a"]


@pytest.mark.requirement("HH-24")
def test_an_empty_line_between_two_requests_is_skipped(server: Served) -> None:
    assert statuses(server.exchange(post(b"Content-Length: 4") + b"\r\n" + LAST)) == [200, 200]


@pytest.mark.requirement("HH-24")
@pytest.mark.parametrize("size", [b"Content-Length: 4", b"Transfer-Encoding: chunked"])
def test_an_answer_before_100_continue_ends_the_connection(server: Served, size: bytes) -> None:
    """The client sends no body after such an answer, and its next request must not be taken for the body."""
    sent = post(b"Expect: 100-continue", size, body=b"").replace(b"/first", b"/early")
    found = server.exchange(sent)
    assert statuses(found) == [200]
    assert b"connection: close\r\n" in found


@pytest.mark.requirement("HH-24")
def test_a_body_after_100_continue_is_read_and_the_connection_goes_on(server: Served) -> None:
    with server.connect() as connection:
        connection.sendall(post(b"Expect: 100-continue", b"Content-Length: 4", body=b""))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"body" + LAST)
        assert statuses(rest(connection)) == [200, 200]


def test_head_is_answered_without_body_and_the_next_request_after_it(server: Served) -> None:
    found = server.exchange(get(line=b"HEAD /first HTTP/1.1") + LAST)
    assert found.count(b"content-length: 3\r\n") == 2
    assert found.count(b"</>") == 1


@pytest.mark.parametrize("keep", [b"", b"Connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_one_answer_without_chunks(server: Served, keep: bytes) -> None:
    for path in (b"/first", b"/open"):
        found = server.exchange(b"GET " + path + b" HTTP/1.0\r\n" + keep + b"\r\n" + LAST)
        assert statuses(found) == [200]
        assert b"\r\nconnection: close\r\n" in found and b"chunked" not in found
        assert found.endswith(b"\r\n\r\n</>")
    assert [one[0] for one in APP.requests] == ["/first", "/open"]


def test_an_answer_without_length_has_chunks_and_the_connection_goes_on(server: Served) -> None:
    found = server.exchange(get(line=b"GET /open HTTP/1.1") + LAST)
    assert statuses(found) == [200, 200]
    assert b"transfer-encoding: chunked\r\n\r\n3\r\n</>\r\n0\r\n\r\nHTTP/1.1 200 " in found


@pytest.mark.parametrize("close", [b"Connection: close", b"Connection: x, Close"])
def test_bytes_after_a_request_that_closes_are_ignored(server: Served, close: bytes) -> None:
    further = LAST.replace(b"/last", b"/early")
    found = server.exchange(get(close) + further + b"\0\xff")
    assert statuses(found) == [200]
    server.exchange(LAST)
    assert [one[0] for one in APP.requests] == ["/first", "/last"]


def test_a_request_after_an_answer_that_closes_is_not_served() -> None:
    begun = []

    async def closing(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    with served(closing) as server:
        assert statuses(server.exchange(get() + LAST)) == [200]
    assert begun == ["/first"]


def test_bytes_that_are_no_request_after_one_are_refused_when_that_is_answered(server: Served) -> None:
    assert statuses(server.exchange(get() + b"\0\xff")) == [200, 400]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_large_body_arrives_unchanged(server: Served, is_chunked: bool) -> None:
    body = (b"\r\n\r\n0\r\n\r\n" + bytes(range(256))) * 8000
    if is_chunked:
        parts = [body[start : start + 70_001] for start in range(0, len(body), 70_001)]
        sent = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in parts) + b"0\r\n\r\n"
    else:
        sent = post(b"Content-Length: %d" % len(body), body=body)
    with server.connect() as connection:
        sender = threading.Thread(target=connection.sendall, args=(sent + LAST,))
        sender.start()
        found = rest(connection)
        sender.join(30)
    assert APP.requests[0][1] == body
    assert statuses(found.replace(body, b"")) == [200, 200]


@pytest.mark.parametrize("behind", [b"", LAST], ids=["alone", "pipelined"])
def test_a_chunked_body_of_any_length_ends_where_its_client_says(server: Served, behind: bytes) -> None:
    """The server reads 16 KiB at a time, so the end of some of these lengths is in two reads."""
    for length in [*range(HEAD_BYTES - 4, HEAD_BYTES + 9), *range(2 * HEAD_BYTES - 4, 2 * HEAD_BYTES + 9)]:
        APP.requests.clear()
        body = b"1" * (length - len(b"%x\r\n\r\n0\r\n\r\n" % length))
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        assert len(chunks) == length
        head = CHUNKED if behind else CHUNKED.replace(HOST, HOST + b"Connection: close\r\n")
        found = server.exchange(head + chunks + behind)
        assert statuses(found) == ([200, 200] if behind else [200]), length
        assert [one[:2] for one in APP.requests] == [("/first", body), ("/last", b"")][: 2 if behind else 1]


@pytest.mark.long
@pytest.mark.parametrize("trailer", [b"", b"X: " + b"1" * 1000 + b"\r\n"], ids=["no trailer", "a trailer"])
def test_the_limit_between_two_chunks_is_that_of_one_request(server: Served, trailer: bytes) -> None:
    """Four times the limit, over all requests of one connection."""
    empty = CHUNKED + b"0\r\n" + trailer + b"\r\n"
    count = 4 * HEAD_BYTES // len(b"0\r\n" + trailer + b"\r\n")
    with server.connect() as connection:
        sender = threading.Thread(target=connection.sendall, args=(empty * count + LAST,))
        sender.start()
        found = rest(connection)
        sender.join(30)
    assert statuses(found) == [200] * (count + 1)
