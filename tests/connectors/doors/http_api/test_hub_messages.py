"""Messages at two gateways: sent once, handed out once, and the same again for whoever asks the same again."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from connectors.hub.services.mailbox_waits import same_request
from connectors.hub.services.mailboxes import MailboxIndex
from schemas.fold.settled import AppliedChange
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MessageRow
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import MESSAGES, TASKS, one_of, post

SENT, DRAINERS, PATIENCE_S = 300, 4, 60.0


def sent(client, recipient, payload=None):
    """Send a message that is taken; its id."""
    answer = post(client, recipient, payload)
    assert (answer.status_code, answer.json()["delivered"]) == (200, True)
    return answer.json()["message_id"]


def drained(client, limit=100, request_id=None):
    """Return the answer of a drain."""
    headers = {} if request_id is None else {"X-Request-ID": request_id}
    answer = client.get(MESSAGES, params={"limit": limit}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["messages"]


def ids(messages):
    """The ids of messages, in their order."""
    return [message["id"] for message in messages]


def payloads_of(messages):
    """Return the texts of messages, in order."""
    return [message["payload"] for message in messages]


def reader(hub):
    """A new principal with a mailbox: its name, and a client of it at each gateway."""
    name, token = hub.principal("worker")
    return name, hub.client(token), hub.client(token, 1)


@pytest.mark.requirement("HH-06")
@pytest.mark.requirement("HH-11")
def test_what_is_sent_at_one_gateway_is_handed_out_at_the_other_at_once_and_once(hub):
    name, here, there = reader(hub)
    for _ in range(20):
        message_id = sent(hub.operator, name, {"text": "hello"})
        message = one_of(drained(there))
        assert message.pop("timestamp").endswith("Z")
        assert message == {
            "id": message_id,
            "sender": "operator",
            "recipient": name,
            "type": "note",
            "payload": {"text": "hello"},
        }
        assert drained(here) == drained(there) == []


@pytest.mark.requirement("HB-09")
def test_a_message_marked_as_read_is_in_no_drain_and_marks_of_other_mailboxes_are_unknown(hub):
    name, here, _ = reader(hub)
    _, stranger, _ = reader(hub)
    first, second = sent(hub.operator, name, 1), sent(hub.operator, name, 2)

    def marked(client, *message_ids):
        answer = client.post(f"{MESSAGES}/read", json={"message_ids": message_ids})
        assert answer.status_code == 200, answer.text
        return answer.json(), answer.headers.get("Trunkline-Verdict")

    assert marked(here) == ({"read": [], "not_marked": [], "unknown": []}, None)
    unknown = {"read": [], "not_marked": [], "unknown": [first]}
    assert marked(stranger, first) == marked(hub.operator, first) == (unknown, None)
    read = {"read": [first], "not_marked": [], "unknown": ["m-none"]}
    assert marked(here, first, "m-none", first) == (read, "accepted")
    assert marked(here, "m-none", first) == (read, "duplicate")
    assert ids(drained(here)) == [second]
    shown = here.get(f"/api/hub/mailboxes/default/{name}").json()["messages"]
    assert [one["status"] for one in shown] == ["read", "claimed"]


@pytest.mark.requirement("HH-06")
def test_a_drain_sees_all_that_was_answered_before_also_where_it_is_not_settled_yet(hub):
    name, here, there = reader(hub)
    behind = hub.gateways[1].program.process
    for _ in range(6):
        behind.send_signal(signal.SIGSTOP)
        try:
            message_id = sent(hub.operator, name)
            with ThreadPoolExecutor(1) as pool:
                # It lies in the gateway's socket when the gateway wakes up, beside the log's news.
                asked = pool.submit(drained, there)
                behind.send_signal(signal.SIGCONT)
                assert ids(asked.result(20)) == [message_id]
        finally:
            behind.send_signal(signal.SIGCONT)
    assert drained(here) == []


@pytest.mark.requirement("HH-06")
def test_four_drains_at_two_gateways_get_each_of_300_messages_exactly_once(hub):
    name, token = hub.principal("worker")
    posted: list[str] = []
    taken: list[str] = []
    deadline = time.monotonic() + PATIENCE_S

    def send(number):
        client = (hub.operator, hub.other)[number]
        for count in range(SENT // 2):
            posted.append(sent(client, name, count))

    def drain(number):
        client = hub.client(token, number % 2)
        while len(taken) < SENT and time.monotonic() < deadline:
            taken.extend(ids(drained(client, limit=1 + 3 * number)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(2)]
    threads += [threading.Thread(target=drain, args=(number,)) for number in range(DRAINERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert len(posted) == len(set(posted)) == SENT
    assert sorted(taken) == sorted(posted)
    assert drained(hub.client(token)) == drained(hub.client(token, 1)) == []


@pytest.mark.requirement("HH-06")
def test_a_drain_sent_again_under_its_request_id_gets_the_same_at_either_gateway(hub):
    name, here, there = reader(hub)
    posted = [sent(hub.operator, name, number) for number in range(5)]
    first = drained(here, 3, "r1")
    assert ids(first) == posted[:3]
    for client in (there, here):
        posted.append(sent(hub.other, name, "later"))
        assert drained(client, 3, "r1") == first
    assert ids(drained(there, 100, "r2")) == posted[3:]
    for client in (here, there):
        assert drained(client, 3, "r1") == first
        assert ids(drained(client, 100, "r2")) == posted[3:]
        assert drained(client) == []
    other_limit = here.get(MESSAGES, params={"limit": 4}, headers={"X-Request-ID": "r1"})
    assert (other_limit.status_code, other_limit.json()["reason"]) == (409, "seq_conflict")
    # The id of a request is its principal's own.
    other, theirs, _ = reader(hub)
    message_id = sent(hub.operator, other)
    assert ids(drained(theirs, 3, "r1")) == [message_id]


@pytest.mark.requirement("HH-06")
def test_one_request_id_used_many_times_at_once_at_both_gateways_is_one_drain(hub):
    name, here, there = reader(hub)
    posted = [sent(hub.operator, name, number) for number in range(10)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: ids(drained((here, there)[number % 2], 6, "once")), range(16)))
    assert found == [posted[:6]] * 16
    assert ids(drained(there)) == posted[6:]


@pytest.mark.requirement("HH-06")
def test_messages_are_handed_out_in_the_order_in_which_they_were_sent(hub):
    name, here, there = reader(hub)
    posted = [sent((hub.operator, hub.other)[number % 2], name, number) for number in range(30)]
    batches = [drained((here, there)[number % 2], 7) for number in range(6)]
    assert [len(batch) for batch in batches] == [7, 7, 7, 7, 2, 0]
    assert [message_id for batch in batches for message_id in ids(batch)] == posted
    left = [sent(hub.operator, name) for _ in range(3)]
    assert here.get(MESSAGES, params={"limit": 1}).json()["left"] == 2
    assert ids(drained(here)) == left[1:]
    for limit in ("0", "-1", "1001", "x", "1" * 30):
        assert here.get(MESSAGES, params={"limit": limit}).status_code == 400


@pytest.mark.requirement("HH-06")
@pytest.mark.requirement("HH-12")
def test_a_message_sent_again_under_its_key_is_the_same_message_at_either_gateway(hub):
    name, here, _ = reader(hub)
    key = {"Idempotency-Key": f"once-for-{name}"}
    answers = [post(client, name, {"n": 1}, **key) for client in (hub.operator, hub.other, hub.operator)]
    assert [answer.status_code for answer in answers] == [200] * 3
    message_id = one_of({answer.json()["message_id"] for answer in answers})
    assert ids(drained(here)) == [message_id]
    # Also after it was handed out.
    assert post(hub.other, name, {"n": 1}, **key).json()["message_id"] == message_id
    for payload, kind in (({"n": 2}, "note"), ({"n": 1}, "other"), (None, "note")):
        refused = post(hub.other, name, payload, kind, **key)
        assert (refused.status_code, refused.json()["reason"]) == (409, "seq_conflict")
    assert drained(here) == []
    # A key is its sender's own.
    own = hub.client(hub.principal("delegator")[1])
    assert post(own, name, {"n": 3}, **key).json()["message_id"] != message_id


@pytest.mark.requirement("HH-06")
@pytest.mark.requirement("HH-12")
def test_a_message_to_nobody_known_is_refused_with_404_and_leaves_a_row(hub):
    name, token = hub.principal("delegator")
    delegator = hub.client(token)
    gone, _ = hub.principal("worker")
    hub.operator.post(f"/api/hub/principals/{gone}/revoke", json={})
    for recipient in ("nobody-at-all", gone, "trunkline"):
        answer = post(delegator, recipient, "secret text")
        assert (answer.status_code, answer.json()["reason"]) == (404, "unknown_recipient"), recipient
        assert set(answer.json()) == {"reason", "message"}
    rows = wait_until(lambda: len(found := hub.refusals(name)) == 3 and found, what="a row for each")
    assert {(row["reason"], row["route"]) for row in rows} == {("unknown_recipient", f"POST {MESSAGES}")}
    assert "secret text" not in str(rows)
    assert [one for one in hub.log() if one.stream == "mailbox/default/nobody-at-all"] == []


@pytest.mark.requirement("HH-06")
def test_agents_principals_the_operator_and_the_hub_have_mailboxes(hub):
    name, here, _ = reader(hub)
    for recipient in ("idle", "hub", "operator", name):
        sent(hub.operator, recipient, "to each")
    assert [message["payload"] for message in drained(here)] == ["to each"]
    assert "to each" in [message["payload"] for message in drained(hub.other)]


@pytest.mark.requirement("HH-06")
def test_two_tasks_of_one_agent_share_its_mailbox(hub):
    first, second = hub.submit("lazy"), hub.submit("lazy")
    agents = [hub.client(first.token), hub.client(second.token, 1)]
    wait_until(lambda: agents[1].get(MESSAGES).status_code == 200, what="the token")
    posted = [sent(hub.operator, "lazy", number) for number in range(6)]
    assert ids(drained(agents[0], 2)) + ids(drained(agents[1], 2)) + ids(drained(agents[0])) == posted
    name, here, _ = reader(hub)
    sent(agents[0], name, "from the agent")
    assert one_of(drained(here))["sender"] == "lazy"
    # Their requests are their own, whatever ids they give them.
    for number, agent in enumerate(agents):
        sent(hub.operator, "lazy", number)
        assert payloads_of(drained(agent, request_id="1")) == [number]
        answer = post(agent, name, f"of {number}", **{"Idempotency-Key": "1"})
        assert (answer.status_code, answer.json()["delivered"]) == (200, True)
    assert payloads_of(drained(here)) == ["of 0", "of 1"]
    assert payloads_of(drained(agents[0], request_id="1")) == [0]
    for task in (first, second):
        hub.operator.post(f"{TASKS}/{task.id}/cancel", json={})


PAYLOADS = [
    None,
    True,
    0,
    -1.5,
    1e300,
    2**63 - 1,
    -(2**63),
    "",
    'ünï\u2028\U0001f680\u0000\u001f\\"',
    [],
    {},
    {"": {"a": [1, None, "x"]}},
    {"event": "something.else", "text": "x"},
    list(range(1000)),
]


@pytest.mark.requirement("HH-06")
def test_any_json_comes_out_of_a_mailbox_as_it_went_in(hub):
    name, here, there = reader(hub)
    deep: object = "the end"
    for _ in range(60):
        deep = [deep]
    payloads = [*PAYLOADS, deep]
    for payload in payloads:
        sent(hub.operator, name, payload)
    assert [message["payload"] for message in drained(there)] == payloads
    assert drained(here) == []


def _row(status, **changed):
    row = {"realm": "default", "recipient": "bo", "message_id": "m1", "status": status, "sender": "ann"}
    known = {"from_verified": True, "from_task": None, "kind": "x", "priority": "normal", "in_reply_to": None}
    rest = {"thread": None, "broadcast_id": None, "sent_at": None, "expires_at": None, "posted_at": 1}
    return MessageRow(**row, **known, **rest, **changed)


@pytest.mark.requirement("HH-10")
@pytest.mark.requirement("HH-13")
def test_what_was_handed_out_while_the_rows_were_loaded_does_not_wait_any_more():
    index, bo = MailboxIndex(), ("default", "bo")
    claimed = AppliedChange(MAILBOX_VIEW, "default/bo/m1", 7, _row("claimed", request_id="r1"))

    def listed_before():
        # The row as it was when the rows were listed; the change comes while they are taken in.
        index.changed(claimed)
        yield _row("unread")

    index.load(listed_before())
    assert (index.depth(bo), index.deepest(9), index.handed(bo, "r1")) == (0, [], ["m1"])
    request = same_request("r1")
    assert index.earlier([("default", "ada"), bo], request) == (bo, "r1")
    assert index.earlier([("default", "ada")], request) is None and index.earlier([bo], "another") is None


@pytest.mark.requirement("HH-06")
def test_what_is_pending_is_shown_page_by_page_oldest_first_and_nothing_is_taken(hub):
    name, here, there = reader(hub)
    path = f"/api/hub/mailboxes/default/{name}"
    sent_ids = [sent(hub.operator, name, number) for number in range(7)]
    assert ids(drained(there, limit=2)) == sent_ids[:2]
    wait_until(lambda: here.get(path, params={"pending": True}).json()["total"] == 5, what="two are taken")
    pages, after = [], {}
    while page := here.get(path, params={"pending": True, "limit": 2, **after}).json()["messages"]:
        assert [message["body"] for message in page] == [str(sent_ids.index(m["message_id"])) for m in page]
        pages.append([message["message_id"] for message in page])
        after = {"after": pages[-1][-1]}
    assert pages == [sent_ids[2:4], sent_ids[4:6], sent_ids[6:]]
    # Also after a message that has been taken since.
    gone = {"pending": True, "after": sent_ids[1]}
    assert [one["message_id"] for one in here.get(path, params=gone).json()["messages"]] == sent_ids[2:]
    assert ids(drained(here)) == sent_ids[2:]


@pytest.mark.requirement("HB-03")
def test_an_envelope_with_a_type_alone_is_an_empty_message_to_the_hub(hub):
    answer = hub.operator.post(MESSAGES, json={"type": "ping"})
    assert (answer.status_code, answer.json()["delivered"]) == (200, True), answer.text
    message_id = answer.json()["message_id"]
    records = [one for one in hub.log() if one.body.get("message_id") == message_id]
    posted = one_of([one.body for one in records if one.type == "message.posted"])
    assert (posted["to"], posted["kind"], posted["body"]) == ("hub", "ping", "{}")
    name, client, _ = reader(hub)
    assert hub.operator.post(MESSAGES, json={"recipient": name, "type": "ping"}).status_code == 200
    assert payloads_of(drained(client)) == [{}]
