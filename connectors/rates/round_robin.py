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

    def push(self, key: _K, item: _T) -> None:
        """Add an item. A key without items gets the last turn."""
        self._waiting.setdefault(key, deque()).append(item)

    def pop(self) -> _T:
        """Remove and return the oldest item of the key whose turn it is. Raises KeyError if there is none."""
        key, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[key] = items
        return item

    def __bool__(self) -> bool:
        return bool(self._waiting)
