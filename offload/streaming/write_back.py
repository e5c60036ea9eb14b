"""Writing what is in memory and differs from the store."""

from offload.memory import memory_of
from offload.optim.model_state import ModelState, parameter_key, state_key
from offload.optim.window import Window


def write_dirty(state: ModelState, window: Window) -> None:
    """Writes resident and cached records, and resident parameters, that differ from the store's."""
    store, dirty = state.store, state.dirty
    assert store is not None
    tickets = []
    for record in state.layout.records:
        if state_key(record) not in dirty:
            continue
        if state.records is not None:
            memory = memory_of(state.records[record.name])
        elif (cached := window.cached_state(record)) is not None:
            memory = cached
        else:
            continue
        tickets.append(store.write(state_key(record), memory, num_bytes=record.num_bytes))
    for name, flat in (state.parameters or {}).items():
        memory = memory_of(flat)
        for s in state.layout.subgroups[name]:
            if parameter_key(s) in dirty:
                part = memory[s.offset_bytes : s.offset_bytes + s.padded_parameter_bytes]
                tickets.append(store.write(parameter_key(s), part, num_bytes=s.parameter_bytes))
    for ticket in tickets:
        ticket.wait()
    dirty.clear()
