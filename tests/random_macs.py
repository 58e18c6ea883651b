"""Random rules of MACs among the records of a partition, and records whose MACs are missing, old or forged."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from schemas.keys.record_macs import GATEWAY
from schemas.keys.sealing import Keyring
from schemas.streams.control.record_macs import mac_key_ended_records, macs_required_records
from schemas.wire.record import MAC_HEADERS
from tests.raw_records import Raw, raw, with_mac


class RandomMacs:
    """Passes records of a log with one partition on, some with another MAC, and adds records about MACs.

    `keyring` needs two master keys. The active one makes most MACs, and `old`, its other key, some.
    """

    def __init__(self, draw: random.Random, keyring: Keyring, old: Keyring) -> None:
        self._draw = draw
        self._key, self._old_key = keyring.mac_key(GATEWAY), old.mac_key(GATEWAY)

    def records(self, made: Iterable[Raw], often: float) -> Iterator[Raw]:
        """The records, each with the probability `often` after a record about MACs."""
        for one in made:
            if self._draw.random() < often:
                yield self._rule()
            roll = self._draw.random()
            if roll < 0.1:
                yield with_mac(_without_mac(one), self._old_key)
            elif roll < 0.15:
                yield _without_mac(one)
            elif roll < 0.2 and one.value:
                yield one._replace(value=one.value.replace(b"worker", b"wurker").replace(b"agent", b"argent"))
            else:
                yield one

    def _rule(self) -> Raw:
        (required,) = macs_required_records(1)
        # A record cannot end the key of its own MAC. If both keys ended, no record would be accepted.
        endings = {key: next(mac_key_ended_records(1, key.master)) for key in (self._key, self._old_key)}
        record, key = self._draw.choice(
            [
                *[(required, self._key)] * 3,
                (required, None),
                (endings[self._key], self._key),
                (endings[self._old_key], self._key),
                (endings[self._old_key], self._old_key),
                (endings[self._old_key], None),
            ]
        )
        return raw(record) if key is None else with_mac(raw(record), key)


def _without_mac(record: Raw) -> Raw:
    names = MAC_HEADERS[-2:]
    return record._replace(headers=[one for one in record.headers if one[0] not in names])
