"""What the user changed of parameters in place, between steps."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offload.errors import StoreError
from offload.optim.model_state import ModelState, parameter_key
from offload.streaming.unit import Edit

logger = logging.getLogger("offload.streaming")


class Edits:
    """Notes which parameters the user changed: they are the master again.

    Edits of units that leave their slots are noted by who sees them; those of resident parameters
    are found by their version counters, and by their bytes.

    Concurrency: The thread that runs the model.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, is_training: bool) -> None:
        """Stores its arguments.

        Args:
            parameters: By name; may be filled later.
            is_training: False: there is no master that an edit replaces.
        """
        self._state: ModelState
        self._parameters = parameters
        self._is_training = is_training
        self._seen_versions: dict[str, int] = {}
        # Where resident parameters have their values, by name; see `_view_of`.
        self._views: dict[str, _View] = {}
        # Of what only bytes show, by name: the hash before the first edit since its last update.
        self._hashes_before: dict[str, int] = {}

    def use(self, state: ModelState) -> None:
        """Takes the state in which edits are noted from now on."""
        self._state = state
        self._views.clear()

    def see(self) -> None:
        """Takes the values of now as seen: only later changes are edits."""
        self.see_versions()
        if self._state.seen is not None:
            self._state.seen.note_all()

    def see_versions(self) -> None:
        """As `see`, where bytes that changed were seen already."""
        self._hashes_before.clear()
        self._seen_versions = {name: p._version for name, p in self._parameters.items()}

    def note_resident(self, *, before_commit: bool) -> None:
        """Notes the edits of resident parameters since they were seen.

        Args:
            before_commit: Also those that no update has to know of.

        Raises:
            StoreError: One has another shape or dtype now.
        """
        edited = {name: None for name in self._parameters if self._is_edited(name)}
        elsewhere, seen = self._state.elsewhere, self._state.seen
        if elsewhere is not None:
            edited |= dict.fromkeys(elsewhere.changed())
        if seen is not None:
            edited |= dict.fromkeys(seen.changed(before_commit=before_commit))
        self._note(list(edited))
        if elsewhere is not None:  # after they are noted: an interrupt must not lose them
            elsewhere.bring(edited)
        if seen is not None:
            seen.see_changed()

    def note_streamed(self, edits: Sequence[Edit]) -> None:
        """Notes the edits of a unit in its slot.

        One that no counter shows and that was taken back is none, whether its unit left the slot
        between the two or not.
        """
        edited, before = self._state.edited, self._hashes_before
        for name in before.keys() - edited:  # a commit has made it the master
            del before[name]
        for edit in edits:
            if edit.hashes is None:
                before.pop(edit.name, None)
            elif edit.name not in edited:
                before[edit.name] = edit.hashes[0]
        self._note([edit.name for edit in edits])
        for edit in edits:
            if edit.hashes is not None and before.get(edit.name) == edit.hashes[1]:
                edited.discard(edit.name)
                del before[edit.name]

    def _note(self, names: Sequence[str]) -> None:
        if not names:
            return
        trainable = {n for n in names if self._state.layout.parameters[n][0].is_trainable}
        if self._is_training:
            self._state.edited.update(trainable)
        if self._state.parameters is not None:
            layout = self._state.layout
            for name in names:
                shard, placed = layout.parameters[name]
                self._state.dirty.update(
                    parameter_key(s)
                    for s in layout.subgroups[shard.name]
                    if placed.start < s.stop and s.start < placed.stop
                )
        logger.info(
            "%d parameters were edited in place (first: `%s`): they are the master again",
            len(names),
            names[0],
        )

    def _is_edited(self, name: str) -> bool:
        """Whether the user changed a resident parameter; data that was replaced is taken over."""
        view, parameter = self._view_of(name), self._parameters[name]
        values = view.values
        if parameter.shape != view.shape or parameter.dtype != values.dtype:
            raise StoreError(
                f"cannot update parameter `{name}`: expected {tuple(values.shape)} of "
                f"{values.dtype}, found {tuple(parameter.shape)} of {parameter.dtype}; do not "
                "change a wrapped model's shapes or dtypes"
            )
        if parameter.data_ptr() != view.address and values.numel():
            values.copy_(parameter.data)
            parameter.data = values
            return True
        return parameter._version != self._seen_versions[name]

    def _view_of(self, name: str) -> "_View":
        view = self._views.get(name)
        if view is None:
            elsewhere = self._state.elsewhere
            shown = self._state.parameters if elsewhere is None else elsewhere.flat
            assert shown is not None
            shard, placed = self._state.layout.parameters[name]
            values = shown[shard.name][placed.start : placed.stop].view(placed.facts.shape)
            view = _View(values=values, shape=values.shape, address=values.data_ptr())
            self._views[name] = view
        return view


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A resident parameter's values."""

    values: torch.Tensor
    shape: torch.Size
    address: int
