"""What the user changed of parameters in place, between steps."""

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from offload.errors import StoreError
from offload.optim.model_state import ModelState, parameter_key

logger = logging.getLogger("offload.streaming")


class Edits:
    """Notes which parameters the user changed: they are the master again.

    Edits of units that leave their slots are noted by who sees them; those of resident parameters
    are found by their version counters.

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

    def use(self, state: ModelState) -> None:
        """Takes the state in which edits are noted from now on."""
        self._state = state

    def see(self) -> None:
        """Takes the values of now as seen: only later changes are edits."""
        self._seen_versions = {name: p._version for name, p in self._parameters.items()}

    def note_resident(self) -> None:
        """Notes the edits of resident parameters since they were seen.

        Raises:
            StoreError: One has another shape or dtype now.
        """
        edited = [name for name in self._parameters if self._is_edited(name)]
        elsewhere = self._state.elsewhere
        if elsewhere is not None:
            edited += [name for name in elsewhere.changed() if name not in edited]
            elsewhere.bring(edited)
        self.note(edited)

    def note(self, names: Sequence[str]) -> None:
        """Notes that these parameters were edited."""
        if not names:
            return
        trainable = {n for n in names if self._parameters[n].requires_grad}
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
        elsewhere = self._state.elsewhere
        shown = self._state.parameters if elsewhere is None else elsewhere.flat
        assert shown is not None
        shard, placed = self._state.layout.parameters[name]
        flat, parameter = shown[shard.name], self._parameters[name]
        view = flat[placed.start : placed.stop].view(placed.facts.shape)
        if parameter.shape != view.shape or parameter.dtype != view.dtype:
            raise StoreError(
                f"cannot update parameter `{name}`: expected {tuple(view.shape)} of {view.dtype}, "
                f"found {tuple(parameter.shape)} of {parameter.dtype}; do not change a wrapped "
                "model's shapes or dtypes"
            )
        if view.numel() and parameter.data_ptr() != view.data_ptr():
            view.copy_(parameter.data)
            parameter.data = view
            return True
        return parameter._version != self._seen_versions[name]
