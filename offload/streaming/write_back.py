"""Writing what is in memory and differs from the store."""

from collections import deque
from collections.abc import Iterator

from offload.memory import memory_of
from offload.optim.model_state import ModelState, parameter_key, state_key
from offload.optim.window import Window
from offload.storage.tickets import StoreTicket


def write_dirty(state: ModelState, window: Window, *, num_at_once: int) -> None:
    """Writes resident and cached records, and resident parameters, that differ from the store's.

    Args:
        state: Of the model.
        window: Has the cached records.
        num_at_once: The most writes in flight.
    """
    assert state.store is not None
    in_flight: deque[StoreTicket] = deque()
    for key, memory, num_bytes in _dirty_parts(state, window):
        if len(in_flight) == num_at_once:
            in_flight.popleft().wait()
        in_flight.append(state.store.write(key, memory, num_bytes=num_bytes))
    for ticket in in_flight:
        ticket.wait()
    state.dirty.clear()


def _dirty_parts(state: ModelState, window: Window) -> Iterator[tuple[str, memoryview, int]]:
    """Yields the store's name, the memory and the bytes in use of each."""
    for record in state.layout.records:
        key, memory = state_key(record), window.cached_state(record)
        if state.records is not None:
            memory = memory_of(state.records[record.name])
        if memory is not None and key in state.dirty:
            yield key, memory, record.num_bytes
    for name, flat in (state.parameters or {}).items():
        memory = memory_of(flat)
        for s in state.layout.subgroups[name]:
            if parameter_key(s) in state.dirty:
                stop = s.offset_bytes + s.padded_parameter_bytes
                yield parameter_key(s), memory[s.offset_bytes : stop], s.parameter_bytes
