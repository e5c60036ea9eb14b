"""Policies that a run left open: what a step would take under each, and which one is worth it."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

NEAR = 0.05
"""Of the step time: what is not faster by more than this is no reason to leave the default. The
error of plans on a machine that is alone is of this size."""
_UPDATES = (
    ("resident", "forward"),
    ("resident", "none"),
    ("alternating", "none"),
    ("sequential", "none"),
    ("resident", "both"),
    ("resident", "backward"),
)
"""Order and overlap: all that exist together, in the order in which ties are decided."""
_PREFETCH = (1, 2, 4, 8)
_PLACEMENTS = (
    ("storage", "storage"),
    ("host", "storage"),
    ("storage", "host"),
    ("host", "host"),
)
"""Of parameters and of the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenChoices:
    """The choices that times decide, by their keys of `policy`; none of them changes a result."""

    parameters: str
    optimizer: str
    order: str
    overlap: str
    prefetch: int

    def changed_from(self, other: "OpenChoices") -> dict[str, str | int]:
        """Returns the keys of `policy` that differ from those of `other`, with their values."""
        theirs = asdict(other)
        return {key: value for key, value in asdict(self).items() if value != theirs[key]}

    def is_open_to(self, other: "OpenChoices", open_keys: Collection[str]) -> bool:
        """Returns whether `other` differs, and in what is open alone."""
        changed = other.changed_from(self)
        return bool(changed) and changed.keys() <= set(open_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One policy and the time of its step; None where it does not fit."""

    choices: OpenChoices
    step_s: float | None

    def to_json(self) -> dict[str, str | int | float | None]:
        """Returns its keys of `policy`, and its time."""
        return {**asdict(self.choices), "step_s": self.step_s}


def other_placements(now: OpenChoices, open_keys: Collection[str]) -> Iterator[OpenChoices]:
    """Yields the placements that are open beside that of `now`."""
    for parameters, optimizer in _PLACEMENTS:
        other = replace(now, parameters=parameters, optimizer=optimizer)
        if now.is_open_to(other, open_keys):
            yield other


def other_updates(now: OpenChoices, open_keys: Collection[str]) -> Iterator[OpenChoices]:
    """Yields the orders and overlaps that are open beside those of `now`."""
    for order, overlap in _UPDATES:
        other = replace(now, order=order, overlap=overlap)
        if now.is_open_to(other, open_keys):
            yield other


def other_distances(now: OpenChoices, open_keys: Collection[str]) -> Iterator[OpenChoices]:
    """Yields the prefetch distances that are open beside that of `now`."""
    for prefetch in _PREFETCH:
        other = replace(now, prefetch=prefetch)
        if now.is_open_to(other, open_keys):
            yield other


def fastest(now: Alternative, others: Iterable[Alternative]) -> Alternative:
    """Returns `now` unless another is faster by more than `NEAR`; of near ties the first."""
    best = now
    for other in others:
        if other.step_s is None:
            continue
        if best.step_s is None or other.step_s < best.step_s * (1 - NEAR):
            best = other
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """What was taken where the run left it to the plan."""

    keys: tuple[str, ...]
    """Of `policy`, that were `"auto"`."""
    begun: Alternative
    """What the default preset gives."""
    chosen: Alternative

    @staticmethod
    def of(keys: Collection[str], compared: Sequence[Alternative]) -> "Adoption":
        """Returns what to take of all that was compared, the first of which is the default."""
        begun = compared[0]
        chosen = fastest(begun, compared[1:])
        return Adoption(keys=tuple(sorted(keys)), begun=begun, chosen=chosen)

    @property
    def values(self) -> dict[str, str | int]:
        """The value of each key."""
        return {key: getattr(self.chosen.choices, key) for key in self.keys}

    @property
    def why(self) -> str:
        """The reason in one line."""
        if self.chosen is self.begun:
            return (
                f"a step is predicted to take {self.begun.step_s:.3g} s, and nothing else that "
                f"fits is faster by more than {NEAR:.0%}"
            )
        return (
            f"a step is predicted to take {self.chosen.step_s:.3g} s instead of "
            f"{self.begun.step_s:.3g} s with the default preset"
        )

    def to_json(self) -> dict[str, object]:
        """Returns the keys of `policy` that were chosen, the predicted time and the reason."""
        return {"policy": self.values, "step_s": self.chosen.step_s, "why": self.why}
