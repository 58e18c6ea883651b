"""A queue in which keys, such as principals, take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


class RoundRobin(Generic[_K, _T]):
    """A queue that gives the next item of one key after the other. Not thread-safe.

    The items of a key keep their order. The queue is not bounded.
    """

    def __init__(self) -> None:
        # The keys in the order of their turns, each with its items, oldest first.
        self._waiting: OrderedDict[_K, deque[_T]] = OrderedDict()
        self._held: dict[_K, deque[_T]] = {}

    def push(self, key: _K, item: _T) -> None:
        """Add an item. A key without items gets the last turn."""
        held = self._held.get(key)
        (self._waiting.setdefault(key, deque()) if held is None else held).append(item)

    def pop(self) -> tuple[_K, _T]:
        """Remove the oldest item of the key whose turn it is, and return both.

        Raises KeyError if no key without a hold has an item.
        """
        key, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[key] = items
        return key, item

    def hold(self, key: _K) -> None:
        """Give the key no more turns until `release`. It keeps its items."""
        self._held[key] = self._waiting.pop(key, deque())

    def release(self, key: _K) -> None:
        """Give the key turns again; the last turn comes first. Does nothing for a key without a hold."""
        items = self._held.pop(key, None)
        if items:
            self._waiting[key] = items

    def __bool__(self) -> bool:
        """Return whether a key without a hold has an item."""
        return bool(self._waiting)
