"""Units on storage: one record of parameters per subgroup."""

from offload.layout import ModelLayout, Subgroup, Unit
from offload.optim.pipeline import parameter_key
from offload.storage.engine import Priority
from offload.storage.store import BlockStore
from offload.streaming.unit import Transfer


class StoredUnits:
    """Reads and writes whole units of a layout in a block store."""

    def __init__(self, layout: ModelLayout, store: BlockStore) -> None:
        self._layout = layout
        self._store = store

    def start_read(self, unit: Unit, into: memoryview, *, is_prefetch: bool) -> list[Transfer]:
        """Starts filling `into`, `unit.num_bytes` long, and returns at once."""
        priority = Priority.PREFETCH if is_prefetch else Priority.NEEDED
        return [
            self._store.read(parameter_key(subgroup), memory, priority=priority)
            for subgroup, memory in self._parts(unit, into)
        ]

    def write(self, unit: Unit, source: memoryview) -> None:
        """Writes the whole unit and waits."""
        tickets = [
            self._store.write(parameter_key(subgroup), memory, num_bytes=subgroup.parameter_bytes)
            for subgroup, memory in self._parts(unit, source)
        ]
        for ticket in tickets:
            ticket.wait()

    def _parts(self, unit: Unit, memory: memoryview) -> list[tuple[Subgroup, memoryview]]:
        parts: list[tuple[Subgroup, memoryview]] = []
        for shard in unit.shards:
            for subgroup in self._layout.subgroups[shard.name]:
                start = shard.offset_bytes + subgroup.offset_bytes
                parts.append((subgroup, memory[start : start + subgroup.padded_parameter_bytes]))
        return parts
