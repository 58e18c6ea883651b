"""Requests that an operation cannot take: malformed, too large, of another coding, and about unknown names."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import pytest

from connectors.hub.serving.policy import Reach
from tests.matrix.asking import KEYED, Watched, address, both, each_change, each_operation, operation
from tests.matrix.bounds import at_bounds, bounds_in_table, bounds_of, wrong_texts, wrong_values
from tests.matrix.ground import Ground, fresh
from tests.matrix.memory_gateway import BODY_LIMIT
from tests.matrix.samples import SAMPLES

pytestmark = pytest.mark.requirement("HH-12")

BAD_WORDS = {"job_id": "FFFFFFFF", "token_id": "f" * 13, "key_id": "f" * 15, "scope": "team"}
BAD_NAMES = ("-x", "a%20b", "x" * 129, "%C3%A9", "a+b", "a%23", "a%0A", "%00")
NO_BODIES = (b"{", b"[]", b"7", b'"x"', b"null", b"{}{}", b"\xff", b'{"a": NaN}', b"[" * 70 + b"]" * 70)


# Of a request, in the text of a refusal.
QUOTED = re.compile(r"no.such|x{9}|a b|[\x00-\x1f]")


@pytest.mark.parametrize("name", KEYED)
def test_a_bad_key_is_malformed(ground: Ground, name: str) -> None:
    asked, watched = operation(ground, name), Watched(ground)
    request = address(ground, name)._replace(body=SAMPLES[name].request(ground, ground.operator).body)
    made = len(watched.records)
    for bad in ("", "a b", "\xe9", "x" * 256):
        answer = both(ground, ground.operator, name, request, **{asked.key_header.decode(): bad})
        assert answer.said == (400, "malformed"), bad
    assert len(watched.records) == made


@each_operation
def test_the_bounds_of_the_fields_are_those_of_the_table(ground: Ground, name: str) -> None:
    asked = operation(ground, name)
    for model in (asked.BODY, asked.QUERY):
        if model is not None:
            schema = model.model_json_schema()
            found = list(bounds_of(schema, schema.get("$defs", {})))
            assert found == [(field, *(bounds_in_table(name, field) or ())) for field, *_ in found]


@each_change
def test_a_value_at_a_bound_is_not_malformed(ground: Ground, name: str) -> None:
    asked, good = operation(ground, name), SAMPLES[name].request(ground, ground.operator).body
    schema: dict[str, Any] = {} if asked.BODY is None else asked.BODY.model_json_schema()
    for field, kind in schema.get("properties", {}).items():
        for value in at_bounds(kind, schema.get("$defs", {})):
            # A message expires after it is delivered.
            changed = {**good, "deliver_after_s": None} if "deliver_after_s" in good else good
            changed = {**changed, "expires_in_s": None} if field == "deliver_after_s" else changed
            free = address(ground, name, name=fresh("free"), topic=fresh("free"))
            request = free._replace(body={**changed, field: value})
            assert ground.ask(ground.operator, name, request).status != 400, (field, value)


@each_operation
def test_a_malformed_request_is_refused_with_a_reason_and_recorded(ground: Ground, name: str) -> None:
    asked, sample, caller = operation(ground, name), SAMPLES[name], ground.operator
    good = sample.request(ground, caller).body
    where = address(ground, name)._replace(body=good)
    bad = []
    if asked.QUERY is not None:
        queries = [
            f"{one}={text}"
            for one, kind in asked.QUERY.model_json_schema()["properties"].items()
            for text in wrong_texts(kind)
        ]
        bad = [where._replace(query=f"?{query}") for query in ("no-such-parameter=1", *queries)]
    for word in asked.parameters:
        texts = [BAD_WORDS[word]] if word in BAD_WORDS else BAD_NAMES
        bad += [where._replace(path={**where.path, word: text}) for text in texts]
    watched = Watched(ground)
    if asked.BODY is not None:
        schema = asked.BODY.model_json_schema()
        bodies: list[Any] = [one for one in NO_BODIES if one != b"null" or asked.NEEDS_BODY]
        bodies.append({**good, "no_such_field": 1})
        for field in schema.get("required", ()):
            bodies.append({other: value for other, value in good.items() if other != field})
        for field, kind in schema.get("properties", {}).items():
            bodies += [{**good, field: value} for value in wrong_values(kind, schema.get("$defs", {}))]
        bodies += [json.dumps(good).encode() + b"\x00", b'{"a": 1, "a": 1}']
        bad += [where._replace(body=body) for body in bodies]
    for request in bad:
        answer = both(ground, caller, name, request)
        assert answer.said == (400, "malformed"), (request, answer)
        assert answer.document.keys() == {"reason", "message"}
        assert not QUOTED.search(answer.document["message"]), answer
    assert watched.refused == [("malformed", caller.name, asked.route)] * 2 * len(bad)
    assert not watched.records


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("set_limits", {"scope": "all", "name": "one"}),
        ("set_limits", {"scope": "role", "name": "no-such-role"}),
        ("set_webhook", {"name": "hub"}),
    ],
)
def test_a_request_that_only_the_operation_knows_as_malformed_is_recorded_too(
    ground: Ground, name: str, words: dict[str, str]
) -> None:
    body = SAMPLES[name].request(ground, ground.operator).body
    watched, request = Watched(ground), address(ground, name, **words)._replace(body=body)
    assert both(ground, ground.operator, name, request).said == (400, "malformed")
    assert watched.refused == [("malformed", "operator", operation(ground, name).route)] * 2
    assert not watched.records


@each_change
def test_a_body_of_the_limit_is_read_and_one_byte_more_is_too_large(ground: Ground, name: str) -> None:
    asked, watched, where = operation(ground, name), Watched(ground), address(ground, name)
    if asked.BODY is None:
        return
    filled = b'{"no_such_field": "%b"}'
    for more, said, reason in ((0, 400, "malformed"), (1, 413, "too_large")):
        body = filled % (b"x" * (BODY_LIMIT + more - len(filled) + 2))
        answer = both(ground, ground.operator, name, where._replace(body=body))
        assert answer.said == (said, reason)
    assert [one[0] for one in watched.refused] == ["malformed"] * 2 + ["too_large"] * 2
    assert {one[1:] for one in watched.refused} == {(ground.operator.name, asked.route)}


@pytest.mark.parametrize("name", [name for name, one in SAMPLES.items() if one.unknown != 404])
def test_a_free_name_is_one_that_the_operation_makes_or_shows_as_empty(ground: Ground, name: str) -> None:
    request = address(ground, name, name=fresh("free"), topic=fresh("free"))
    request = request._replace(body=SAMPLES[name].request(ground, ground.operator).body)
    assert ground.ask(ground.operator, name, request).status == SAMPLES[name].unknown


@each_operation
def test_an_unknown_name_is_not_found(ground: Ground, name: str) -> None:
    asked, sample = operation(ground, name), SAMPLES[name]
    if not asked.parameters or sample.unknown != 404:
        return
    request = address(ground, name)._replace(body=sample.request(ground, ground.operator).body)
    watched = Watched(ground)
    answer = both(ground, ground.operator, name, request)
    assert answer.status == 404
    assert answer.document["reason"] in ("not_found", "unknown_stream", "unknown_recipient")
    assert not watched.records
    # A thing that does not exist belongs to nobody.
    for letter in "dw":
        if sample.reach(letter) is Reach.OWN:
            assert ground.ask(ground.caller(letter), name, request).said == (403, "policy"), letter


@pytest.mark.parametrize(
    ("name", "field", "reason"),
    [
        ("send_message", "recipient", "unknown_recipient"),
        ("set_schedule", "recipient", "unknown_recipient"),
        ("submit_task", "agent_name", "policy"),
    ],
)
def test_an_unknown_name_in_the_body_is_not_found_and_recorded(
    ground: Ground, name: str, field: str, reason: str
) -> None:
    request = SAMPLES[name].request(ground, ground.operator, **{field: "nobody-of-this-name"})
    watched = Watched(ground)
    assert both(ground, ground.operator, name, request).status == 404
    assert watched.refused == [(reason, "operator", operation(ground, name).route)] * 2
    assert not watched.records


@pytest.mark.requirement("HH-09")
@pytest.mark.parametrize("blank", ["", " ", " \n\t"])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("send_message", "type"),
        ("broadcast_message", "type"),
        ("publish_message", "type"),
        ("set_schedule", "type"),
        ("submit_task", "description"),
    ],
)
def test_a_blank_text_is_refused_by_the_policy_and_recorded(
    ground: Ground, name: str, field: str, blank: str
) -> None:
    request = SAMPLES[name].request(ground, ground.operator, **{field: blank})
    watched = Watched(ground)
    refused = both(ground, ground.operator, name, request)
    if refused.said != (400, "malformed"):  # of a text of one line
        assert refused.said == (403, "policy")
    assert watched.refused == [(refused.said[1], "operator", operation(ground, name).route)] * 2
    assert not watched.records


HOSTILE = {
    "cut off": b'{"session": "x"',
    "nothing": b" ",
    "Infinity": b'{"description": -Infinity}',
    "too large for a float": b'{"description": 1e999}',
    "too large for 64 bits": b'{"description": 9223372036854775808}',
    "a long number": b'{"description": ' + b"9" * 60_000 + b"}",
    "a lone surrogate": b'{"description": "\\ud800"}',
    "a lone surrogate as a key": b'{"\\udfff": 1}',
    "UTF-16": '{"session": "x"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"session": "x"}',
    "a raw control character": b'{"description": "a\x01b"}',
    "30,000 deep": b"[" * 30_000,
    "10,000 objects deep": b'{"a":' * 10_000,
    "an unknown key": b'{"canary-key": 1}',
}


@pytest.mark.requirement("HH-12")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_body_is_malformed_and_is_not_repeated(ground: Ground, kind: str) -> None:
    request = address(ground, "create_session")._replace(body=HOSTILE[kind])
    answer = both(ground, ground.operator, "create_session", request)
    assert answer.said == (400, "malformed")
    assert "canary" not in answer.document["message"]


@pytest.mark.requirement("HH-12")
@pytest.mark.parametrize("kind", [one for one, body in HOSTILE.items() if body.endswith(b"}")][1:-1])
def test_a_hostile_payload_is_malformed_though_it_may_be_any_json(ground: Ground, kind: str) -> None:
    envelope = b'{"recipient": "hub", "type": "note", "payload": ' + HOSTILE[kind] + b"}"
    request = address(ground, "send_message")._replace(body=envelope)
    assert both(ground, ground.operator, "send_message", request).said == (400, "malformed")


@pytest.mark.requirement("HH-22")
@each_change
def test_a_body_with_another_coding_or_charset_or_range_is_refused(ground: Ground, name: str) -> None:
    if SAMPLES[name].body is None:
        return
    request, watched = SAMPLES[name].request(ground, ground.operator), Watched(ground)
    made, content = len(watched.records), json.dumps(request.body).encode()
    codings = CODINGS if name == "send_message" else CODINGS[:1]
    for headers, body, said in (
        *(({"Content-Encoding": one}, gzip.compress(content), UNSUPPORTED) for one in codings),
        ({"Content-Type": "application/json; charset=latin-1"}, content, UNSUPPORTED),
        ({"Content-Type": 'application/json;Charset = "UTF-16"'}, content, UNSUPPORTED),
        ({"Content-Range": f"bytes 0-1/{len(content)}"}, content, (400, "malformed")),
    ):
        answer = both(ground, ground.operator, name, request._replace(body=body), **headers)
        assert answer.said == said, headers
        if "Content-Encoding" in headers:
            assert answer.headers["accept-encoding"] == "identity"
    assert len(watched.records) == made
    for charset in ("; charset=utf-8", '; charset="UTF-8"'):
        usual = {"Content-Type": f"application/json{charset}", "Content-Encoding": "identity"}
        assert ground.ask(ground.operator, name, request, **usual).status not in (400, 415), charset


CODINGS = ("gzip", "deflate", "br", "gzip, identity", "x-none")
UNSUPPORTED = (415, "unsupported_media_type")


@pytest.mark.long
@pytest.mark.requirement("DL-13")
@each_change
def test_the_example_of_the_documents_is_taken(ground: Ground, name: str) -> None:
    asked = operation(ground, name)
    if asked.BODY is None or not SAMPLES[name].is_alone:
        return
    page = ground.gateway.app.openapi()["paths"][asked.PATH][asked.METHOD.lower()]
    example = page["requestBody"]["content"]["application/json"]["example"]
    if name == "pick_job":
        ground.only_job_for(example["session"])
    elif name == "assign_job":
        ground.no_job_for(example["session"])
    request = SAMPLES[name].request(ground, ground.operator)._replace(body=example)
    said = ground.ask(ground.operator, name, request).said
    # Another agent has the key when its example was before.
    assert said[0] == SAMPLES[name].status or (name, *said) == ("register_key", 403, "policy")
