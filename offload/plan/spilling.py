"""How often a step writes spilled gradients, and reads them back, by the order in which they come.

A unit whose gradients come at two moments of a backward, with those of others between, is written
twice and read back once: `streaming/spilled_gradients.py` does so.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from offload.layout import ModelLayout
from offload.plan.gradients import SPILL_SLOTS, GradientPlan, spilled_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpilledBytes:
    """Gradients that a step moves to storage and back, each subgroup's padded."""

    read_bytes: tuple[int, ...]
    """Of each micro-step, which adds to them."""
    write_bytes: tuple[int, ...]
    """Of each micro-step."""
    update_bytes: int
    """Read by the update."""

    @staticmethod
    def each_once(num_bytes: int, micro_steps: int) -> "SpilledBytes":
        """Returns those of gradients that come unit by unit: too many for the slots."""
        return SpilledBytes(
            read_bytes=tuple(num_bytes if number else 0 for number in range(micro_steps)),
            write_bytes=(num_bytes,) * micro_steps,
            update_bytes=num_bytes,
        )


def spilled_traffic(
    layout: ModelLayout,
    plan: GradientPlan,
    *,
    arrivals: Iterable[str],
    micro_steps: int,
) -> SpilledBytes:
    """Returns what a step moves of the gradients that `plan` spills.

    Args:
        layout: Of the model.
        plan: Of its gradients.
        arrivals: Names of parameters in the order in which a backward gives their gradients.
        micro_steps: Backward passes in the step.
    """
    sizes = spilled_sizes(layout, plan)
    shard_bytes = {
        name: sum(sizes[subgroup.name] for subgroup in layout.subgroups[name])
        for name in plan.spilled
    }
    shard_of = {
        placed.facts.name: name
        for name in plan.spilled
        for placed in layout.shards[name].parameters
    }
    shards = [shard_of[name] for name in arrivals if name in shard_of]
    slots = _Slots()
    for _ in range(2):  # the second step begins with what the first left in slots
        moves = slots.step(shards, micro_steps)
    return SpilledBytes(
        read_bytes=tuple(_bytes_of(each.reads, shard_bytes) for each in moves),
        write_bytes=tuple(_bytes_of(each.writes, shard_bytes) for each in moves),
        update_bytes=sum(shard_bytes[name] for name in set(shards)),
    )


def usual_arrivals(layout: ModelLayout, without_gradient: Collection[str]) -> list[str]:
    """Returns the parameters in the order of gradients of a model used in its layout's order.

    Args:
        layout: Of the model.
        without_gradient: Names of parameters that get none.
    """
    names = [
        placed.facts.name
        for shard in layout.shards.values()
        if shard.is_trainable
        for placed in shard.parameters
    ]
    return [name for name in reversed(names) if name not in without_gradient]


@dataclass(frozen=True, slots=True)
class _Moves:
    """How often each shard is moved in a micro-step."""

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)


class _Slots:
    """Where gradients are: in slots, the latest last, and which of these storage has not."""

    def __init__(self) -> None:
        self._is_dirty: dict[str, bool] = {}

    def step(self, shards: Sequence[str], micro_steps: int) -> list[_Moves]:
        """Returns the moves of each micro-step; what is written after the last one is its own.

        Args:
            shards: In the order in which gradients of theirs come.
            micro_steps: Backward passes in the step.
        """
        moves: list[_Moves] = []
        stored: set[str] = set()
        for _ in range(micro_steps):
            moves.append(now := _Moves())
            for name in shards:
                self._bring(name, stored, now)
        for name in self._is_dirty:
            self._write(name, stored, moves[-1])
        return moves

    def _bring(self, name: str, stored: set[str], moves: _Moves) -> None:
        is_there = name in self._is_dirty
        self._is_dirty.pop(name, None)
        if not is_there:
            for other in self._is_dirty:
                self._write(other, stored, moves)
            if len(self._is_dirty) == SPILL_SLOTS:
                del self._is_dirty[next(iter(self._is_dirty))]
            moves.reads[name] += name in stored
        self._is_dirty[name] = True

    def _write(self, name: str, stored: set[str], moves: _Moves) -> None:
        if self._is_dirty[name]:
            self._is_dirty[name] = False
            stored.add(name)
            moves.writes[name] += 1


def _bytes_of(counts: Mapping[str, int], shard_bytes: Mapping[str, int]) -> int:
    return sum(shard_bytes[name] * count for name, count in counts.items())
