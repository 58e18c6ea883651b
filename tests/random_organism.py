"""Random records of listeners and conversations, for the random log."""

from __future__ import annotations

import random
from typing import Any

from schemas.streams.control import organism
from schemas.streams.thread.threads import ThreadOpened
from schemas.wire.record import OutgoingRecord


def organism_change(draw: random.Random) -> OutgoingRecord:
    """A listener comes or goes, or all of them are loaded."""
    roll, request = draw.random(), f"command-{draw.randrange(300)}"
    names = draw.sample(["fast", "slow", "boss", "boot"], 2)
    listeners = [organism.Listener(name=name, root_tag=name, concurrency=draw.choice([1, 8])) for name in names]
    body: Any
    if roll < 0.3:
        body = organism.OrganismLoaded(request_id=request, digest="5e" * 32, listeners=listeners)
    elif roll < 0.7:
        body = organism.ListenerAdded(request_id=request, listener=listeners[0])
    else:
        body = organism.ListenerRemoved(request_id=request, name=names[0])
    return body.record(door="xml", principal="operator")


def opened_thread(draw: random.Random) -> OutgoingRecord:
    """A conversation is opened, or once more."""
    thread, parent = f"thread-{draw.randrange(60)}", draw.choice(["thread-0", "thread-1"])
    body = ThreadOpened(
        thread=thread,
        parent_thread=parent,
        root_thread="thread-0",
        opened_by=draw.choice(["ann", "bob"]),
        seen_by="fast",
        on_behalf_of="ann",
        kind="search",
        message_id=f"message-{draw.randrange(400)}",
    )
    return thread_record(body, f"opened-{thread}")


def thread_record(body: ThreadOpened, ce_id: str) -> OutgoingRecord:
    """The record that opened a thread before fold version 10."""
    return body.record(ce_id=ce_id, door="reactor", principal="reactor")
