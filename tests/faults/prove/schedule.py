"""The faults of one run, drawn from a seed: the same seed gives the same schedule.

Faults are dealt from two shuffled decks, so that every run of as many seeds as a deck needs has each of them:
one that the streaming jobs feel (each costs a start of Spark), and some of all others. A pure function.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

KILL, STOP, CRASH, FULL_DISK, SECOND = "kill", "stop", "crash", "full_disk", "second"
CUT, SLOW, MUTE = "cut", "slow", "mute"
DELETE, TRUNCATE, REPLACE, MOVE = "delete", "truncate", "replace", "move"
WIPE, FULL_QUEUE, TAKE_ID = "wipe", "full_queue", "take_id"
SLOW_READ, LARGEST, BAD_OUTPUT = "slow_read", "largest", "bad_output"
SKEW, DUPLICATES, REORDER, FORGE = "skew", "duplicates", "reorder", "forge"

STREAMS: Final = "streams"
# A second gateway, which consumers and followers use beside the first. Each run kills it.
PEER: Final = "gateway_peer"
_PARTS: Final = ("gateway", "bridge", "files", "xml_pump")
_BROKERS: Final = ("kafka", "mosquitto")
_LINKS: Final = ("kafka", "mosquitto", "gateway")
_DOORS: Final = ("gateway", "bridge", "files")

REACTOR_STEPS: Final = ("seen", "before_append", "appended", "acknowledged", "committed")
STREAM_POINTS: Final = (
    "after_file",
    "before_ledger_commit",
    "after_ledger_commit",
    "before_views",
    "between_views",
    "in_merge",
    "after_views",
    "in_compaction",
    "maintenance_views",
    "maintenance_ledger",
)
# A program of the library dies when it has taken a message, when it has sent all and acknowledged nothing, and
# when it has acknowledged; when an event is in the outbox alone, and when it was sent and is still there.
LIBRARY: Final = "library"
TAKEN, NOT_ACKED, ACKED = "agent_taken", "agent_sent_not_acknowledged", "agent_acknowledged"
WRITTEN, NOT_CONFIRMED = "job_outbox_written_not_sent", "job_sent_not_confirmed"
LIBRARY_POINTS: Final = (TAKEN, NOT_ACKED, ACKED, WRITTEN, NOT_CONFIRMED)
ACK_POINTS: Final = ("before_kafka_ack", "after_kafka_ack")

FULL_STORES: Final = f"{FULL_DISK}:{STREAMS}.stores"
# Of the local stores of settling. They begin when the stores have something to lose.
STORE_FAULTS: Final = (
    *(f"{how}:{STREAMS}.stores" for how in (DELETE, TRUNCATE, REPLACE, MOVE)),
    FULL_STORES,
)
# Of the first gateway's store, which is killed for it.
GATEWAY_STORE_FAULTS: Final = tuple(f"{how}:gateway.store" for how in (DELETE, TRUNCATE, REPLACE))
# Faults that clients make, each on a thread of its own.
CLIENT_FAULTS: Final = (
    f"{TAKE_ID}:agent",
    f"{TAKE_ID}:bridge",
    f"{SLOW_READ}:events",
    f"{LARGEST}:messages",
    f"{BAD_OUTPUT}:drain",
)
STREAM_FAULTS: Final = (
    *(f"{CRASH}:{STREAMS}.{point}" for point in STREAM_POINTS),
    f"{KILL}:{STREAMS}",
    f"{STOP}:{STREAMS}",
    f"{FULL_DISK}:{STREAMS}",
    f"{SECOND}:{STREAMS}",
    *STORE_FAULTS,
)
OTHER_FAULTS: Final = (
    *(f"{KILL}:{part}" for part in (*_PARTS, *_BROKERS)),
    *(f"{STOP}:{part}" for part in (*_PARTS, *_BROKERS)),
    *(f"{CRASH}:{door}.{point}" for door in _DOORS for point in ACK_POINTS),
    *(f"{CRASH}:gateway.reactor_{step}" for step in REACTOR_STEPS),
    *(f"{FULL_DISK}:{part}" for part in (*_DOORS, "queue", *_BROKERS)),
    *(f"{how}:{link}" for how in (CUT, SLOW, MUTE) for link in _LINKS),
    *(f"{SECOND}:{part}" for part in (*_PARTS, "gateway_port")),
    *GATEWAY_STORE_FAULTS,
    # Mosquitto begins again without its sessions and messages.
    f"{WIPE}:mosquitto",
    # It drops what waits for a bridge that is away, after its PUBACK.
    f"{FULL_QUEUE}:mosquitto",
    *CLIENT_FAULTS,
)
HABITS: Final = (f"{SKEW}:clients", f"{DUPLICATES}:delivery", f"{REORDER}:delivery", f"{FORGE}:events")
KILL_OF_PEER: Final = f"{KILL}:{PEER}"
FOREIGN_WRITER: Final = "foreign:log"
LIBRARY_FAULTS: Final = tuple(f"{CRASH}:{LIBRARY}.{point}" for point in LIBRARY_POINTS)
IN_EACH_SEED: Final = (KILL_OF_PEER, FOREIGN_WRITER, *LIBRARY_FAULTS)
ALL_FAULTS: Final = (*STREAM_FAULTS, *OTHER_FAULTS, *IN_EACH_SEED, *HABITS)

OTHERS_A_SEED: Final = 4
_LOAD_S: Final = 16.0
_FIRST_S: Final = 1.0
# When the second gateway is killed, and a stranger writes: the load is at work before and after.
_IN_THE_MIDST_S: Final = (4.0, 10.0)
# By when all that lasts is over, if it has not begun in the first second.
_OVER_S: Final = 27.0
_SKEWS_S: Final = (-86_400.0, -3_600.0, -600.0, -120.0, 120.0, 600.0, 3_600.0, 86_400.0)


@dataclass(frozen=True)
class Injection:
    """One fault: what, when after the load's begin, for how long (where it lasts), at which hit of a point."""

    fault: str
    at_s: float
    for_s: float = 0.0
    nth: int = 1

    @property
    def kind(self) -> str:
        """The kind of fault."""
        return self.fault.partition(":")[0]

    @property
    def target(self) -> str:
        """The part that the fault hits."""
        return self.fault.partition(":")[2]


@dataclass(frozen=True)
class Schedule:
    """A run: how long clients send, how they behave, and the faults in the order of their time.

    `skew_s`: how far each of the clients' clocks is off. `duplicates`, `reorder`: which part of what is sent is
    sent again, or overtakes its predecessor. `forged`: how many events are made by somebody without the secret.
    """

    seed: int
    load_s: float
    skew_s: tuple[float, ...]
    duplicates: float
    reorder: float
    forged: int
    injections: tuple[Injection, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """The names of all that is to happen, habits of the clients included."""
        habits = (any(self.skew_s), self.duplicates > 0, self.reorder > 0, self.forged > 0)
        found = [name for name, has in zip(HABITS, habits, strict=True) if has]
        return (*(injection.fault for injection in self.injections), *found)

    def as_json(self) -> dict[str, Any]:
        """A document that `schedule_of` reads."""
        return asdict(self)


def schedule_of(document: dict[str, Any]) -> Schedule:
    """The schedule of a document."""
    plain = json.loads(json.dumps(document))
    injections = tuple(Injection(**one) for one in plain.pop("injections"))
    return Schedule(**{**plain, "skew_s": tuple(plain["skew_s"])}, injections=injections)


def draw_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    draw = random.Random(f"schedule/{seed}")
    own = [*_dealt(STREAM_FAULTS, 1, seed), *_dealt(OTHER_FAULTS, OTHERS_A_SEED, seed)]
    placed = [*(_placed(fault, draw) for fault in own), *(_in_the_midst(fault, seed) for fault in IN_EACH_SEED)]
    injections = sorted(placed, key=lambda injection: injection.at_s)
    return Schedule(
        seed=seed,
        load_s=_LOAD_S,
        skew_s=tuple(draw.choice(_SKEWS_S) if draw.random() < 0.5 else 0.0 for _ in range(3)),
        duplicates=draw.choice((0.0, 0.1, 0.3)),
        reorder=draw.choice((0.0, 0.2, 0.5)),
        forged=draw.choice((0, 2, 6)),
        injections=tuple(injections),
    )


def _dealt(deck: Sequence[str], count: int, seed: int) -> list[str]:
    """This seed's cards: decks follow one another without an end, each shuffled anew."""
    found: list[str] = []
    for card in range(seed * count, (seed + 1) * count):
        number, place = divmod(card, len(deck))
        shuffled = random.Random(f"deck/{len(deck)}/{number}").sample(deck, len(deck))
        found.append(shuffled[place])
    # Where two decks meet, a card may come twice.
    return list(dict.fromkeys(found))


def _in_the_midst(fault: str, seed: int) -> Injection:
    # Drawn apart, so that the other faults of a seed do not depend on it.
    draw = random.Random(f"peer/{seed}" if fault == KILL_OF_PEER else f"{fault}/{seed}")
    return Injection(fault, round(draw.uniform(*_IN_THE_MIDST_S), 2))


def _placed(fault: str, draw: random.Random) -> Injection:
    kind, _, target = fault.partition(":")
    # A point of the streaming jobs is armed early: they need most of the load's time to start.
    last = _LOAD_S / 2 if STREAMS in target else _LOAD_S - 3
    at_s = round(draw.uniform(_FIRST_S, last), 2)
    # Spark commits only a few times in a run.
    nth = draw.randint(1, 2 if STREAMS in target else 4) if kind == CRASH else 1
    for_s = round(_lasting(kind, draw), 2)
    # A long fault begins early, so that it is over before the run has to come to rest.
    return Injection(fault, max(_FIRST_S, min(at_s, round(_OVER_S - for_s, 2))), for_s, nth)


def _lasting(kind: str, draw: random.Random) -> float:
    if kind == STOP:
        # 5 to 30 s, and mostly short: all 30 s would be most of what one seed may take.
        return 5 + 25 * draw.random() ** 4
    if kind in (CUT, MUTE, FULL_DISK, TAKE_ID, MOVE):
        return draw.uniform(1, 6)
    if kind in (SLOW, SLOW_READ, FULL_QUEUE):
        return draw.uniform(4, 10)
    return 0.0
