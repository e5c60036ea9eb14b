"""Items in the order in which they are read: a given one, or as a policy chooses."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=int | str)


class ReadingOrder(Generic[Item]):
    """Gives the items one after the other, each peek and take in constant time on average."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = list(items)
        self._taken: set[Item] = set()
        self._first = 0
        self._first_besides = 0

    def __bool__(self) -> bool:
        return len(self._taken) < len(self._items)

    def peek(self, *, besides: Container[Item] = ()) -> Item | None:
        """Returns the first item that was not taken; None if there is none.

        Args:
            besides: Items that wait for others, as long as there are any. Between two calls
                this loses none but what was taken.
        """
        self._first = self._skip(self._first, ())
        if self._first == len(self._items):
            return None
        first = self._items[self._first]
        if first not in besides:
            return first
        self._first_besides = self._skip(max(self._first, self._first_besides), besides)
        is_there = self._first_besides < len(self._items)
        return self._items[self._first_besides] if is_there else first

    def take(self, item: Item) -> None:
        """Says that `item` is not to be given again."""
        self._taken.add(item)

    def _skip(self, position: int, besides: Container[Item]) -> int:
        items = self._items
        while position < len(items) and (
            items[position] in self._taken or items[position] in besides
        ):
            position += 1
        return position


class ChosenOrder:
    """Gives the items that a policy chooses among those that are left."""

    def __init__(self, items: Iterable[int], choose: Callable[[Sequence[int]], int]) -> None:
        self._left = deque(items)
        self._choose = choose

    def __bool__(self) -> bool:
        return bool(self._left)

    def peek(self, *, besides: Container[int] = ()) -> int | None:
        """Returns the chosen item; None if there is none. The policy alone has others wait."""
        del besides
        return self._choose(self._left) if self._left else None

    def take(self, item: int) -> None:
        """Says that `item` is not to be given again."""
        self._left.remove(item)
