"""Moments between the nodes that a thread makes for autograd's graphs.

torch numbers nodes in each thread alone, and a node does not tell its thread. So numbers say what
came first only where one thread has made all nodes in question.
"""

import threading
from dataclasses import dataclass

from torch.autograd.graph import Node

from offload.streaming.torch_private import next_node_number, number_of_node


class Thread:
    """One thread, and none after it: identifiers of threads that have ended are used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment in one thread.

    Attributes:
        thread: None: before all nodes of any.
        number: Nodes that the thread made before have lower ones.
    """

    thread: Thread | None
    number: int

    def is_before(self, node: Node) -> bool | None:
        """Tells whether `node` was made after this, if this thread made it; None: cannot be told.

        A number that this thread has not reached is another one's.
        """
        if self.thread is None:
            return True
        number = number_of_node(node)
        if self.thread is not this_thread() or number >= next_node_number():
            return None
        return self.number <= number


BEGINNING = Moment(thread=None, number=0)


def this_moment() -> Moment:
    """Returns this moment in this thread."""
    return Moment(thread=this_thread(), number=next_node_number())


def this_thread() -> Thread:
    """Returns what stands for this thread."""
    found: Thread | None = getattr(_local, "thread", None)
    if found is None:
        found = _local.thread = Thread()
    return found


_local = threading.local()
