"""Sends, receives, leases and follows the hub's messages, and shows their state.

  trunkline messages send echo ask --text "what time is it?"
  trunkline messages send echo ask '{"text": "what time is it?", "in": "UTC"}' --wait-reply 30s
  trunkline messages send echo ask @question.json                - reads standard input
  trunkline messages send ann answer --text "noon" --in-reply-to 5b7e…
  trunkline messages send ann remind --text "tea" --deliver-after 10m --expires-in 1h --priority high
  trunkline messages send ann report --blob report.pdf
  trunkline messages broadcast news --text "soup is ready"          to all who take part, except the sender
  trunkline messages drain --wait 30s               takes the messages out of your own mailbox
  trunkline messages lease --for 5m --wait 30s      takes them under a lease; then 'ack', 'nack' or 'extend'
  trunkline messages ack 7c1e… 5b7e…                acknowledges messages of a lease
  trunkline messages blob operator 5b7e… --out report.pdf
  trunkline messages follow --mark-read             prints each message as it comes, until Ctrl-C
  trunkline messages xml question.xml               an XML document to the pump's listeners; - is standard input
  trunkline messages peek default/echo              shows a mailbox's messages and takes none
  trunkline messages clear default/echo             takes out all that waits there, for good (operator)
  trunkline messages audit --limit 20               messages that were delivered or refused
  trunkline messages export                         all messages into one Parquet file, for DuckDB and the like

'--blob' sends a file that is larger than a payload may be, up to limits.blob_bytes. It is stored outside the
log, shown with the message by its SHA-256, and removed some time after the last message with it has ended
(limits.blob_keep_s).

The token names the sender, and the mailbox that 'drain', 'lease' and 'follow' read: the operator's, unless
TRUNKLINE_TOKEN holds another token. Each message goes to one drain, which leases it until it is printed; with
--request-id it is taken at once, and the same id again gets the same messages. A reply that 'send' waits for is
leased until it is printed, too. A leased message that is not acknowledged in time is handed out again, before
newer ones of its priority.

'follow' goes on after the last event when a connection is lost. It ends when no gateway answers for a minute.

'export' reads the tables, so it needs no gateway and has the messages that 'streams' has settled. The gateway
writes the same export every hour (agent_mcp.export_interval_ms).

Exit codes: 0; 2 wrong arguments; 3 no such recipient, nothing found, no reply in time; 4 refused, with the
reason; 5 the gateway does not answer; 130 after Ctrl-C.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from connectors.cli.messages import message_arguments, received_messages
from connectors.cli.messages.message_arguments import (
    BLOB,
    CONVERSED,
    PAYLOAD,
    SENT,
    blob_of,
    mailbox_argument,
    mailbox_of,
    payload_of,
    sent_fields,
)
from connectors.cli.messages.received_messages import message_text
from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import duration, limit, read_given, request_id
from connectors.cli.shared.call import Call, Columns
from connectors.cli.shared.declared import Shown, add_declared
from connectors.cli.shared.text_output import age_of
from trunkline_agent.errors import NotFound, Refused
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import DESCRIPTION

# Written out, because the module of the life cycle is slow to import and help must be quick.
STATUSES: Final = ("delayed", "unread", "leased", "claimed", "read", "expired", "cleared", "dead")
ACTIONS: Final = Actions()


@ACTIONS.add(
    argument("recipient", "an agent, a principal, operator, or hub"),
    *PAYLOAD,
    *CONVERSED,
    *SENT,
    BLOB,
    duration("--wait-reply", "wait up to so long for the reply, and take it, e.g. 30s; at most 5m"),
    request_id("the same message, not a second one"),
    example='trunkline messages send echo ask --text "what time is it?" --wait-reply 30s',
    late="payload",
)
def _send(call: Call) -> int:
    """Put a message into a mailbox, and wait for the reply to it if wanted."""
    from connectors.plumbing.gateway_client.gateway_client import path_of

    body = {"recipient": call.recipient, "type": call.type, "payload": payload_of(call), **sent_fields(call)}
    body |= {"blob": blob_of(call)}
    wait_s = call.wait_reply or 0
    wanted = {"wait_reply": wait_s, "reply_lease": received_messages.PRINTED_WITHIN_S} if wait_s else None
    with call.gateway() as gateway, call.named_request("the message was delivered") as name:
        found = gateway.post(path_of("messages"), body, request_id=name, parameters=wanted, wait_s=wait_s)
    place = "lies in" if found["delivered"] else "is stored, and comes later into"
    text = f"message {escaped(found['message_id'])} {place} the mailbox of {escaped(call.recipient)}"
    reply, lease_id = found.get("reply"), found.pop("lease_id", None)
    if lease_id is not None:
        del reply["attempt"], reply["deadline"]
    with received_messages.acknowledging(call, {} if lease_id is None else {lease_id: [reply["id"]]}):
        shown = [] if reply is None else ["", message_text(reply)]
        call.print_answer({**found, "request_id": name}, text, *shown)
    if wait_s and reply is None:
        later = f"in your mailbox, with in_reply_to {escaped(found['message_id'])}"
        raise NotFound(f"no reply came in time; a later one will be {later}")
    return 0


@ACTIONS.add(
    *PAYLOAD,
    *SENT,
    BLOB,
    request_id("the same broadcast; recipients that joined in between get it, too"),
    example='trunkline messages broadcast news --text "soup is ready"',
    late="payload",
)
def _broadcast(call: Call) -> int:
    """Put a message into the mailbox of all who take part and of the operator, except the sender's."""
    body = {"type": call.type, "payload": payload_of(call), "blob": blob_of(call), **sent_fields(call)}
    answer = call.post_named("messages", "broadcast", possible_effect="messages were delivered", **body)
    text = f"broadcast {escaped(answer['broadcast_id'])} lies in {answer['recipients']} mailboxes"
    return call.print_answer(answer, text)


@ACTIONS.add(
    argument("file", "the document, a <message> with a payload; - is standard input"),
    argument("--as", "in the name of a human listener (operator)", dest="sender", metavar="LISTENER"),
    *SENT,
    request_id("the same message, not a second one"),
    example="trunkline messages xml question.xml",
)
def _xml(call: Call) -> int:
    """Send an XML document to the listener that it names, or to all that take its root tag.

    A `<huh>` in answer is printed, and the command ends as refused.
    """
    from connectors.plumbing.gateway_client.gateway_client import post_xml

    document = read_given(call.file, "FILE", call.settings.limits.payload_bytes)
    with call.gateway() as gateway, call.named_request("the message was delivered") as request_id:
        fields = sent_fields(call)
        posted = post_xml(gateway, document, sender=call.sender, request_id=request_id, sent=fields)
    answer = {"thread": posted.thread, "messages": posted.messages, "huh": posted.huh, "request_id": request_id}
    if posted.huh is not None:
        from connectors.cli.organism.console_lines import shown_xml

        call.print_answer(answer, shown_xml(posted.huh))
        raise Refused("it was not understood; the <huh> says what would be right")
    sent = [f"message {escaped(name)} waits for {escaped(to)}" for to, name in posted.messages.items()]
    return call.print_answer(answer, *sent, f"thread  {escaped(posted.thread)}")


ACTIONS.extend([*received_messages.ACTIONS, *message_arguments.ACTIONS])


_MESSAGE_COLUMNS: Final[Columns] = {
    "MESSAGE": "message_id",
    "STATE": "status",
    "AGE": lambda row: age_of(row["posted_at"]),
    "FROM": lambda row: row["sender"] if row["from_verified"] else f"{row['sender']} (not verified)",
    "TYPE": "kind",
    **{one.label.upper(): one.name for one in DESCRIPTION},
    "PRIORITY": "priority",
    "ATTEMPTS": "attempts",
    "TAKEN BY": "handed_to",
    "LAST REASON": "last_reason",
    "BODY": "body",
}


@ACTIONS.add(
    mailbox_argument(" (default: default/operator)", nargs="?", default="operator"),
    argument("--status", "only these: " + ", ".join(STATUSES), choices=STATUSES, metavar="STATUS"),
    limit(),
    example="trunkline messages peek default/echo",
)
def _peek(call: Call) -> int:
    """Show the newest messages of a mailbox, also those that were taken; take none."""
    found = call.get("mailboxes", *mailbox_of(call.mailbox), limit=call.limit, status=call.status)
    return call.print_rows(found, "messages", _MESSAGE_COLUMNS)


@ACTIONS.add(
    mailbox_argument(),
    request_id("the same clearing, and takes out nothing more"),
    example="trunkline messages clear default/echo",
)
def _clear(call: Call) -> int:
    """Take all waiting messages out of a mailbox; they are never delivered (for the operator)."""
    path = ("mailboxes", *mailbox_of(call.mailbox), "clear")
    answer = call.post_named(*path, possible_effect="the mailbox was cleared")
    text = f"{answer['cleared']} messages were taken out of {escaped(call.mailbox)}"
    return call.print_answer(answer, text)


@ACTIONS.add(
    argument(
        "file",
        "a path or a URI (default: agent_mcp.export_file, <data_dir>/export/messages.parquet)",
        nargs="?",
    ),
    example="trunkline messages export && duckdb -c \"select * from 'var/export/messages.parquet'\"",
)
def _export(call: Call) -> int:
    """Write all messages into one Parquet file; replaces an older one."""
    # Imported here, because Arrow and deltalake are slow to import, and the other actions do not need them.
    from connectors.log.ledger_files.message_export_reader import export_file, export_messages, place_of

    place = place_of(call.file, Path()) if call.file else export_file(call.settings)
    made = export_messages(call.settings, place)
    answer = {"file": str(made.file), "messages": made.messages, "bytes": made.size_bytes}
    text = f"{made.messages} messages are in {escaped(str(made.file))} ({made.size_bytes} bytes)"
    return call.print_answer(answer, text)


_AUDIT_COLUMNS: Final[Columns] = {
    "AGE": lambda row: age_of(row["at"]),
    "VERDICT": "verdict",
    "FROM": "sender",
    "TO": "recipient",
    "TYPE": "type",
    "MESSAGE": "message_id",
    "REASON": "reason",
    "WHY": "why",
}


add_declared(ACTIONS, "messages", Shown("audit", columns=_AUDIT_COLUMNS))
