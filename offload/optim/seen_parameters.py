"""What resident parameters were when they were last seen: other bytes are an edit of the user's."""

from collections.abc import Iterable, Mapping

import torch
from xxhash import xxh3_64_intdigest

from offload.layout import ModelLayout, PlacedParameter, Subgroup
from offload.memory import memory_of


class SeenParameters:
    """Hashes of the parameters that live in host memory, where the user writes to them.

    [Note: edits of resident parameters that no counter shows]
    Users write through `parameter.data`, which moves no version counter. What the codec keeps
    beside a 16-bit parameter then belongs to other values. So such a parameter is hashed after each
    update, while it is in the cache, and before the next one, at the rate of a read. What has no
    such master (a frozen one, or one in fp32) has only to be written by the next commit: it is
    hashed after a commit and before the next one, unless an update has changed it meanwhile.

    Concurrency: The thread that updates notes what it updated; the one that runs the model calls
        the rest, while no update is pending.
    """

    def __init__(
        self, layout: ModelLayout, flat: Mapping[str, torch.Tensor], *, is_trained: bool
    ) -> None:
        """Notes nothing yet.

        Args:
            layout: Of the model; its subgroups are used.
            flat: The flat shards by name, which the parameters are views of.
            is_trained: Whether masters are kept.
        """
        # By subgroup and parameter: the bytes, and the hash of those that were seen.
        self._parts: dict[str, dict[str, memoryview]] = {}
        self._hashes: dict[str, dict[str, int]] = {}
        # The hashes of what was last found changed.
        self._found: dict[str, dict[str, int]] = {}
        self._with_master: set[str] = set()
        for name, shard in layout.shards.items():
            memory = memory_of(flat[name])
            for subgroup in layout.subgroups[name]:
                self._parts[subgroup.name] = {
                    placed.facts.name: _part(memory, subgroup, placed)
                    for placed in layout.parameters_in(subgroup)
                }
                self._hashes[subgroup.name] = {}
                if is_trained and shard.is_trainable and shard.dtype != "float32":
                    self._with_master.add(subgroup.name)

    def note_all(self) -> None:
        """Takes the bytes of now as seen."""
        for hashes in self._hashes.values():
            hashes.clear()
        self.note_missing()

    def note_missing(self) -> None:
        """Takes the bytes of now as seen where an update has changed them unseen."""
        for subgroup, parts in self._parts.items():
            hashes = self._hashes[subgroup]
            for name in parts.keys() - hashes.keys():
                hashes[name] = xxh3_64_intdigest(parts[name])

    def note_updated(self, subgroup: str, names: Iterable[str]) -> None:
        """Takes what an update has just written of these parameters of a subgroup as seen."""
        parts, hashes = self._parts[subgroup], self._hashes[subgroup]
        for name in names:
            if subgroup in self._with_master:
                hashes[name] = xxh3_64_intdigest(parts[name])
            else:
                hashes.pop(name, None)

    def changed(self, *, before_commit: bool) -> list[str]:
        """Returns the parameters whose bytes are not those that were seen.

        They are found again until `see_changed`: who asks may be interrupted.

        Args:
            before_commit: Also those that have no master apart.
        """
        self._found = {}
        names: dict[str, None] = {}
        for subgroup in self._parts if before_commit else self._with_master:
            hashes = self._hashes[subgroup]
            for name, before in hashes.items():
                after = xxh3_64_intdigest(self._parts[subgroup][name])
                if after != before:
                    self._found.setdefault(subgroup, {})[name] = after
                    names[name] = None
        return list(names)

    def see_changed(self) -> None:
        """Takes what `changed` has found as seen."""
        for subgroup, hashes in self._found.items():
            self._hashes[subgroup].update(hashes)
        self._found = {}


def _part(memory: memoryview, subgroup: Subgroup, placed: PlacedParameter) -> memoryview:
    start, stop = max(placed.start, subgroup.start), min(placed.stop, subgroup.stop)
    return memory[start * subgroup.itemsize : stop * subgroup.itemsize]
