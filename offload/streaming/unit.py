"""One unit at run time: its parameters, where its bytes are, and who holds it."""

import contextlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, runtime_checkable

import torch
import xxhash
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from offload.errors import OffloadError, StoreError
from offload.layout import Unit
from offload.memory import memory_of, view_as
from offload.streaming.graph_moments import BEGINNING, Moment, this_moment
from offload.streaming.placeholders import Placeholder, find_written
from offload.streaming.torch_private import num_references


class Transfer(Protocol):
    """What a unit waits for while it is fetched."""

    def wait(self) -> None: ...
    def done(self) -> bool: ...


@runtime_checkable
class Counted(Protocol):
    """A transfer from storage.

    Attributes:
        counted_bytes: What the store has counted of it so far.
    """

    counted_bytes: int


def counted_bytes_of(transfers: Iterable[Transfer]) -> int:
    """Returns what the store has counted of the transfers, as far as they are from there."""
    return sum(each.counted_bytes for each in transfers if isinstance(each, Counted))


@contextlib.contextmanager
def quietly(ignored: type[Exception] = OffloadError) -> Iterator[None]:
    """Ignores an error, which somebody else may have and keep: it must not keep memory too."""
    try:
        yield
    except ignored as error:
        error.__traceback__ = None


def wait_quietly(transfers: Iterable[Transfer]) -> None:
    """Waits until none of the transfers touches memory any more, whatever they give."""
    for transfer in transfers:
        with quietly():
            transfer.wait()


@contextlib.contextmanager
def filling_slots() -> Iterator[None]:
    """Makes what any pass may use, and keeps no slot as long as an error.

    A pass in inference mode fetches for those that follow it, and frames of an error have tensors.
    """
    try:
        with torch.inference_mode(mode=False):
            yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


def start_all(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Returns what an iterator starts; if it ends in an error, what it had started is over."""
    started: list[Transfer] = []
    try:
        started.extend(transfers)
    except BaseException:  # an interrupt too: nobody else knows of these, and they use the memory
        wait_quietly(started)
        raise
    return started


class CopyState(Enum):
    """Where a unit's bytes are, and who may touch them."""

    ABSENT = auto()
    """In no slot: its parameters are placeholders."""
    FETCHING = auto()
    """In a slot that the I/O engine is filling; nobody else may read it."""
    CLEAN = auto()
    """In a slot, equal to the stored bytes unless the user edits them."""


TRANSITIONS = {
    CopyState.ABSENT: {CopyState.FETCHING},
    CopyState.FETCHING: {CopyState.CLEAN, CopyState.ABSENT},
    CopyState.CLEAN: {CopyState.ABSENT},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Which values of a parameter: by its counter, and by how often others were seen.

    Attributes:
        since: When these were first seen.
    """

    version: int
    num_changes: int
    since: Moment


class Binding:
    """A parameter and its place in its unit's slot.

    Attributes:
        placeholder: What the parameter points to while the unit is absent.
        seen_version: The version counter when the bytes were last known to equal the store's.
        values_since: When values were last seen to have changed.
        num_changes: How often they were.
    """

    __slots__ = (
        "name",
        "num_bytes",
        "num_changes",
        "offset_bytes",
        "parameter",
        "placeholder",
        "seen_version",
        "values_since",
    )

    def __init__(
        self, parameter: nn.Parameter, *, name: str, offset_bytes: int, device: torch.device | None
    ) -> None:
        self.parameter = parameter
        self.name = name
        self.offset_bytes = offset_bytes
        self.num_bytes = parameter.numel() * parameter.element_size()
        self.placeholder = Placeholder(parameter, device=device)
        self.seen_version = parameter._version
        self.values_since = BEGINNING
        self.num_changes = 0

    def attach(self, base: torch.Tensor) -> None:
        """Points the parameter at its bytes in the slot under `base`."""
        self.parameter.data = self.values_in(base)

    def see_version(self) -> None:
        """Takes what the parameter is now as what is stored: an update counts as a change."""
        if self.parameter._version != self.seen_version:
            self.see_change()

    def see_change(self) -> None:
        """As `see_version`, of other values than before, whatever the counter says."""
        self.seen_version = self.parameter._version
        self.values_since = this_moment()
        self.num_changes += 1

    @property
    def values(self) -> Values:
        """Which values the parameter has now, as far as that was seen."""
        return Values(
            version=self.parameter._version,
            num_changes=self.num_changes,
            since=self.values_since,
        )

    def values_in(self, base: torch.Tensor) -> torch.Tensor:
        """Returns the parameter's values in the slot under `base`."""
        parameter = self.parameter
        return view_as(
            base,
            offset_bytes=self.offset_bytes,
            num_elements=parameter.numel(),
            dtype=parameter.dtype,
        ).view(parameter.shape)

    def detach(self, base: torch.Tensor | None = None) -> None:
        """Points the parameter at its placeholder; with `base` only if it is in that slot."""
        if base is None or self.is_in(base):
            self.parameter.data = self.placeholder.tensor

    @property
    def was_touched(self) -> bool:
        """Whether the parameter was written to, or given other memory, while it was absent.

        See [Note: a write to an absent parameter shows]: some writes show in the placeholder alone.
        """
        parameter = self.parameter
        is_elsewhere = parameter.data_ptr() != self.placeholder.address
        return is_elsewhere or parameter._version != self.seen_version

    def is_in(self, base: torch.Tensor) -> bool:
        """Tells whether the parameter points at its bytes in the slot under `base`."""
        address = base.data_ptr() + self.offset_bytes
        return not self.num_bytes or self.parameter.data_ptr() == address

    def is_edited(self, base: torch.Tensor) -> bool:
        """Returns whether the user changed the parameter in place since `attach`.

        Raises:
            StoreError: The parameter points elsewhere: its bytes cannot be known.
        """
        parameter = self.parameter
        if not self.is_in(base):
            raise StoreError(
                f"cannot release parameter `{self.name}`: expected its data in its slot, found "
                "other memory; assign values in place, such as `parameter.copy_(values)` under "
                "`torch.no_grad()`, instead of replacing `parameter.data`"
            )
        return parameter._version != self.seen_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What the user did to a parameter in its slot.

    Attributes:
        hashes: Of its bytes before and after, where these alone show it; None where the version
            counter moved.
    """

    name: str
    hashes: tuple[int, int] | None


class StreamedUnit:
    """A unit, its bindings and its copy state.

    Attributes:
        base: uint8 tensor over the slot while there is one; its storage owns the slot.
        transfers: What fills the slot while `FETCHING`.
        is_wide: No slot holds it: only a look from outside brings it whole, into memory of its own.
        subgroups: Bytes of each subgroup of a wide unit.
        num_holds: Calls that use the unit now; above 0 it is not evicted.
        is_updated: Whether all that is in the slot, or will be, comes from its update.
        was_used: Whether the unit was accessed since it was fetched.
        was_looked_at: Whether that was from outside a pass, where it may have been edited.
        fetched_since_s: When its last fetch was started, by the clock of `time.perf_counter`.
        hashes: Of each binding's bytes when they were last known to equal the store's, where they
            are watched: an edit through `parameter.data` moves no version counter.
    """

    def __init__(
        self,
        layout: Unit,
        index: int,
        parameters: Mapping[str, nn.Parameter],
        *,
        device: torch.device | None = None,
        subgroups: Sequence[range] | None = None,
    ) -> None:
        self.layout = layout
        self.is_wide = subgroups is not None
        self.subgroups = subgroups or ()
        self.index = index
        self.bindings = [
            Binding(
                parameters[placed.facts.name],
                name=placed.facts.name,
                offset_bytes=shard.offset_bytes + placed.start * shard.itemsize,
                device=device,
            )
            for shard in layout.shards
            for placed in shard.parameters
        ]
        self.state = CopyState.ABSENT
        self.base: torch.Tensor | None = None
        self.transfers: list[Transfer] = []
        self.num_holds = 0
        self.is_updated = False
        self.was_used = False
        self.was_looked_at = False
        self.fetched_since_s = 0.0
        self.hashes: list[int] | None = None
        self._nodes: list[Node] = []
        self._references: list[int] = []
        # By the number of a binding: how often it was referred to before someone took it.
        self._kept: dict[int, int] = {}
        self._saved: dict[int, int] = {}

    def begin(self) -> None:
        """Points the parameters to their placeholders, and begins to count who refers to them.

        Where these are on another device than the parameters were, torch gives up the nodes that
        accumulate gradients: those of before would not be what graphs refer to.
        """
        for binding in self.bindings:
            binding.detach()
        self._nodes = _gradient_nodes(self.bindings)

    def note_references(self) -> None:
        """Notes how often each parameter is referred to before a call."""
        self._references = self._count_references()

    def find_kept(self) -> None:
        """Finds the parameters to which a call has left references, such as `ctx.weight = weight`.

        They are read themselves: no hook brings them back.
        """
        after = self._count_references()
        for index, (before, now) in enumerate(zip(self._references, after, strict=True)):
            if now > before:
                self._kept[index] = min(before, self._kept.get(index, before))

    def note_access(self, parameter_id: int) -> None:
        """Says that someone is about to take a parameter: it is kept while it is referred to."""
        self._note(self._kept, parameter_id, self._count_references())

    def note_look(self, parameter_id: int) -> None:
        """As `note_access` from outside a pass, where only graphs and views keep a parameter."""
        self._note(self._saved, parameter_id, self._count_saved())

    def forget_kept(self) -> None:
        """Forgets who keeps parameters, which leave their slot."""
        self._kept.clear()
        self._saved.clear()

    @property
    def kept_names(self) -> list[str]:
        """The parameters that someone has taken and still refers to."""
        if not self._kept and not self._saved:
            return []
        now, saved = self._count_references(), self._count_saved()
        self._kept = {i: before for i, before in self._kept.items() if now[i] > before}
        self._saved = {i: before for i, before in self._saved.items() if saved[i] > before}
        return [self.bindings[i].name for i in sorted({*self._kept, *self._saved})]

    def _note(self, taken: dict[int, int], parameter_id: int, counts: list[int]) -> None:
        for index, binding in enumerate(self.bindings):
            if id(binding.parameter) == parameter_id:
                taken[index] = min(counts[index], taken.get(index, counts[index]))

    def _count_references(self) -> list[int]:
        return [
            sys.getrefcount(binding.parameter) + num_references(binding.parameter)
            for binding in self.bindings
        ]

    def _count_saved(self) -> list[int]:
        return [num_references(binding.parameter) for binding in self.bindings]

    @property
    def name(self) -> str:
        return self.layout.name

    def move_to(self, state: CopyState) -> None:
        """Changes the copy state along the table of allowed transitions."""
        assert state in TRANSITIONS[self.state], f"unit `{self.name}`: {self.state} to {state}"
        self.state = state

    def show(self, *, is_hashed: bool) -> None:
        """Points the parameters at their slot, which has their bytes.

        Args:
            is_hashed: Whether the bytes are watched.
        """
        assert self.base is not None
        for binding in self.bindings:
            binding.attach(self.base)
        if is_hashed:
            self.note_hashes()
        self.transfers = []
        self.move_to(CopyState.CLEAN)  # last: what an interrupt leaves half done is fetched anew

    def leave_slot(self) -> None:
        """Points the parameters away from their slot and gives it up.

        May be called again where an interrupt ended it: what was done is not done twice.
        """
        if self.base is not None:
            for binding in self.bindings:
                binding.detach(self.base)
        self.forget_kept()
        self.transfers = []
        self.base = None
        self.hashes = None
        self.is_updated = False
        if self.state is not CopyState.ABSENT:
            self.move_to(CopyState.ABSENT)

    def note_hashes(self) -> None:
        """Notes the bytes of now, to find later which the user edited."""
        self.hashes = self._hash()

    def edits(self) -> list[Edit]:
        """Returns what the user changed in place while it was resident, since that was seen."""
        assert self.base is not None
        unwatched = [0] * len(self.bindings)
        before = self.hashes or unwatched
        after = self._hash() if self.hashes else unwatched
        edits: list[Edit] = []
        for binding, one, other in zip(self.bindings, before, after, strict=True):
            if binding.is_edited(self.base):
                edits.append(Edit(name=binding.name, hashes=None))
            elif one != other:
                edits.append(Edit(name=binding.name, hashes=(one, other)))
        return edits

    def see_edits(self, edits: Iterable[Edit]) -> None:
        """Takes what is in the slot now as seen, these edits among it."""
        names = {edit.name for edit in edits}
        for binding in self.bindings:
            if binding.name in names:
                binding.see_change()
        if self.hashes:
            self.note_hashes()

    def _hash(self) -> list[int]:
        assert self.base is not None
        memory = memory_of(self.base.cpu())  # itself where it is there already
        return [
            xxhash.xxh3_64_intdigest(memory[b.offset_bytes : b.offset_bytes + b.num_bytes])
            for b in self.bindings
        ]

    def binding_at(self, offset_bytes: int) -> Binding:
        """Returns the binding whose bytes contain `offset_bytes` of the slot."""
        for binding in reversed(self.bindings):
            if binding.offset_bytes <= offset_bytes:
                return binding
        return self.bindings[0]


def _gradient_nodes(bindings: Iterable[Binding]) -> list[Node]:
    """Returns the nodes that accumulate gradients; held, they refer to parameters for good."""
    with torch.inference_mode(mode=False):
        return [get_gradient_edge(b.parameter).node for b in bindings if b.parameter.requires_grad]


def require_untouched(
    bindings: Iterable[Binding], *, reads_values: bool, present: Iterable[Binding] = ()
) -> None:
    """Raises StoreError if the user wrote to a parameter while it was absent.

    Args:
        bindings: Of parameters that are absent.
        reads_values: Whether to look for writes that left a parameter its placeholder.
        present: Of parameters that came into slots since they could be written to: the values of
            their placeholders are read too.
    """
    absent = [b for b in bindings if b.num_bytes]
    for binding in absent:
        _require_same_kind(binding)
    written = [b.name for b in absent if b.was_touched]
    if reads_values:
        written += find_written({b.name: b.placeholder for b in (*absent, *present)})
    if written:
        raise StoreError(
            f"cannot fetch parameter `{written[0]}`: expected nothing written to it while it "
            "was not in memory, found a write through `parameters()` or a kept reference; "
            "edit it as an attribute of its module, such as `module.weight.copy_(values)` "
            "under `torch.no_grad()`"
        )


def _require_same_kind(binding: Binding) -> None:
    """Raises StoreError if the model was cast or moved: what was done to it was a placeholder."""
    found, made = binding.parameter, binding.placeholder.tensor
    if found.dtype != made.dtype or found.device != made.device:
        raise StoreError(
            f"cannot fetch parameter `{binding.name}`: expected it in {made.dtype} on "
            f"`{made.device}` as it was when the model was wrapped, found {found.dtype} on "
            f"`{found.device}`, as after `model.to(...)`; cast or move a model before `wrap`, or "
            "cast what `model.state_dict()` returns"
        )
