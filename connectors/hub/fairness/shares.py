"""Places that principals share: event streams, uploads and connections (LM-22).

A principal may have about as many places as it leaves free for all others, the same rule as for the bytes of
answers (`connectors.hub.fairness.byte_budget`). One alone gets less than half of the places, two get a
quarter each. Others find a few places free then, too, and the last ones are the operator's.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

# The parts of all places that are the operator's alone, that stay free for principals with few places, and that
# count as few.
_OPERATORS: Final = 32
_OF_MANY: Final = 8
_FEW: Final = 64


def may_have_one_more(limit: int, taken: int, own: int, *, is_operator: bool = False) -> bool:
    """Return whether a principal may take one more place.

    Args:
        limit: The number of all places.
        taken: The number of places that all principals have.
        own: The number of places that this principal has.
        is_operator: Whether the principal is an operator, who may have all that are free.
    """
    free = limit - taken
    if is_operator:
        return free > 0
    free -= limit // _OPERATORS
    return free > 0 and (own < max(1, limit // _FEW) or own < free - limit // _OF_MANY)


class Places:
    """Places for things that principals do at the same time, such as streams. Not thread-safe.

    Args:
        limit: The number of all places.
        most: The most places of one principal, in addition to the rule of this module. None: no such limit.
    """

    def __init__(self, limit: int, most: int | None = None) -> None:
        self._limit = limit
        self._most = limit if most is None else most
        self._held: Counter[str] = Counter()

    def take(self, principal: str, *, is_operator: bool = False) -> bool:
        """Take a place for a principal, and return whether it may have one more. Does not block.

        After True, the caller must call `give_back` once. After False, it must not.
        """
        own = self._held[principal]
        taken = self._held.total()
        if own >= self._most or not may_have_one_more(self._limit, taken, own, is_operator=is_operator):
            return False
        self._held[principal] += 1
        return True

    def give_back(self, principal: str) -> None:
        """Free the place of a principal. Call it once for each successful `take`."""
        self._held[principal] -= 1
        self._held += Counter()  # removes principals without a place
