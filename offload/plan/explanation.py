"""Why a plan is as it is: one line for each choice, and what no budget covers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.layout import ModelLayout
from offload.plan.host import HostPlan
from offload.plan.prediction import Choices
from offload.plan.tiles import slot_bytes_of
from offload.plan.traffic import ModelBytes, StepTraffic
from offload.plan.window import LEAST_BUFFERS, num_at_once
from offload.sizes import format_size

NOT_BOUNDED = "not bounded"
AUTOCAST_ITEMSIZE = 2
"""Of bf16 and fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of a plan, with its reason in one line."""

    choice: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncovered:
    """Memory outside the budgets."""

    what: str
    num_bytes: int | None
    """None: not bounded."""

    def to_json(self) -> dict[str, object]:
        """Returns the bytes, or that they are not bounded."""
        value = NOT_BOUNDED if self.num_bytes is None else self.num_bytes
        return {"what": self.what, "num_bytes": value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A change that lets a run fit a smaller tier."""

    change: str
    tier: str
    smallest_bytes: int
    """Of the tier, with the change."""
    why: str


def explain(
    layout: ModelLayout, host: HostPlan | None, traffic: StepTraffic, choices: Choices
) -> Iterator[Choice]:
    """Yields the choices of a plan in the order of the tiers."""
    if host is None:
        yield Choice(
            choice="offload", value="false", why="everything stays in memory, for comparison"
        )
        return
    model = ModelBytes.of(layout)
    yield _parameters(model, traffic, choices)
    yield _gradients(host)
    yield _optimizer(model, traffic, choices)
    if choices.optimizer == "storage" or choices.parameters == "storage":
        yield _records(layout, host)
        yield _cache(layout, host, choices)
        yield Choice(
            choice="striping",
            value=choices.striping,
            why="shares of the paths follow what each delivered lately"
            if choices.striping == "adaptive"
            else "shares of the paths are fixed",
        )
    if host.slot_bytes:
        yield _slots(host, choices)
    yield _overlap(choices)


def not_covered(
    layout: ModelLayout,
    *,
    tiled: frozenset[str] = frozenset(),
    activation_bytes: int | None,
    drains: bool,
    record_bytes: int,
) -> Sequence[Uncovered]:
    """Returns what lies outside the budgets, each with its bytes or as not bounded.

    Args:
        layout: Of the model.
        tiled: Names of units whose gradients come in pieces, each no more than a slot.
        activation_bytes: Saved tensors and logits, where they were measured.
        drains: Whether checkpoints are copied elsewhere.
        record_bytes: Of the largest record.
    """
    largest = slot_bytes_of(layout, tiled)
    found = [
        Uncovered(what="activations, logits and loss", num_bytes=activation_bytes),
        Uncovered(what="gradients of one unit on their way", num_bytes=largest),
        Uncovered(what="workspaces and generated code of libraries", num_bytes=None),
        Uncovered(what="copies that `state_dict` returns", num_bytes=None),
        Uncovered(what="page cache where a path refuses O_DIRECT", num_bytes=None),
    ]
    cast = autocast_bytes(layout)
    if cast:
        what = "casts under autocast, if it is used: at most, until its region ends"
        found.append(Uncovered(what=what, num_bytes=cast))
    if drains:
        found.append(Uncovered(what="copying of checkpoints", num_bytes=record_bytes))
    return found


def autocast_bytes(layout: ModelLayout) -> int:
    """Returns the bytes of all fp32 matrices and kernels, cast to two bytes an element."""
    facts = (placed.facts for _, placed in layout.parameters.values())
    return sum(
        AUTOCAST_ITEMSIZE * each.num_elements
        for each in facts
        if each.dtype == "float32" and len(each.shape) >= 2
    )


def _parameters(model: ModelBytes, traffic: StepTraffic, choices: Choices) -> Choice:
    size = format_size(model.parameter_bytes)
    if choices.parameters == "storage":
        fetched = sum(m.forward_read_bytes + m.backward_read_bytes for m in traffic.micro_steps)
        why = (
            f"frees {size} of memory; each step fetches {format_size(fetched)} for its passes and "
            f"writes {format_size(traffic.update.parameter_write_bytes)}"
        )
    elif choices.parameters == "device":
        moved = format_size(model.trainable_parameter_bytes)
        why = (
            f"takes {size} of the device's memory and of the host's, where updates change them; "
            f"passes move none, and each step copies {moved} to the device"
        )
    else:
        why = f"takes {size} of memory; passes wait for nothing"
    return Choice(choice="parameters", value=choices.parameters, why=why)


def _gradients(host: HostPlan) -> Choice:
    plan = host.gradients
    if not plan.spilled:
        why = f"{format_size(plan.resident_bytes)}, read once by the update and never moved"
        return Choice(choice="gradients", value="host", why=why)
    why = (
        f"the budget holds {format_size(plan.resident_bytes)} of them; each pass writes "
        f"{format_size(plan.spilled_bytes)}, of {len(plan.spilled)} units, and the update reads it"
    )
    return Choice(choice="gradients", value="storage", why=why)


def _optimizer(model: ModelBytes, traffic: StepTraffic, choices: Choices) -> Choice:
    size = format_size(model.state_bytes)
    if choices.optimizer == "storage":
        moved = format_size(traffic.update.state_bytes)
        why = f"{size} would fill memory; each step reads and writes {moved} of it"
    else:
        why = f"takes {size} of memory; updates move nothing"
    return Choice(choice="optimizer state", value=choices.optimizer, why=why)


def _records(layout: ModelLayout, host: HostPlan) -> Choice:
    count, window = len(layout.records), host.window_bytes
    value = (
        f"{count} records of at most {format_size(host.buffer_bytes)}, {host.num_places} in a "
        f"window of {format_size(window)}"
    )
    at_once = num_at_once(host.num_buffers, host.num_places, host.num_cached, count)
    if at_once >= min(LEAST_BUFFERS, count):
        why = "enough to read, update and write at one time, small enough for short ramps"
    elif host.num_cached:
        why = "reads, the pass and writes wait for each other, less than a smaller cache would cost"
    else:
        why = "the budget has room for no more: reads, the pass and writes wait for each other"
    if host.num_places > host.num_buffers:
        why += f"; {host.num_buffers} have a buffer for state, others bring it from the cache"
    return Choice(choice="subgroups and window", value=value, why=why)


def _cache(layout: ModelLayout, host: HostPlan, choices: Choices) -> Choice:
    share = host.num_cached / max(len(layout.records), 1)
    if host.num_cached:
        why = f"memory that is left keeps {host.num_cached} records ({share:.0%}) between steps"
    elif choices.order == "sequential":
        why = "every record is read and written in every step; `alternating` would use spare memory"
    else:
        why = "no memory is left for a cache"
    return Choice(choice="order", value=choices.order, why=why)


def _slots(host: HostPlan, choices: Choices) -> Choice:
    # Without room for more slots nothing is read ahead, whatever was asked for.
    ahead = min(choices.prefetch, host.num_slots - 1)
    slots = f"{host.num_slots} slot{'' if host.num_slots == 1 else 's'}"
    why = "a unit is fetched while those before it compute"
    if not ahead:
        why = "each unit is fetched when it is needed"
        if choices.prefetch:
            why += f": {choices.prefetch} ahead would need more memory"
    return Choice(
        choice="slots and prefetch",
        value=f"{slots} of {format_size(host.slot_bytes)}, {ahead} ahead",
        why=why,
    )


def _overlap(choices: Choices) -> Choice:
    reasons = {
        "none": "updates run after backward, by themselves",
        "forward": "each record is updated under the next forward, before its unit is used",
    }
    return Choice(
        choice="overlap",
        value=choices.overlap,
        why=reasons.get(choices.overlap, "a record is updated when its gradients are complete"),
    )
