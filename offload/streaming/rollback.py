"""Bringing a wrapped model back to a state that the store has current."""

from collections.abc import Mapping

from torch import nn

from offload.optim.pipeline import ModelState
from offload.streaming.adoption import Adoption


def read_back(state: ModelState, parameters: Mapping[str, nn.Parameter]) -> None:
    """Reads what is resident from the store again, and drops gradients and pending edits.

    Units must have left their slots before the store changed.
    """
    for parameter in parameters.values():
        parameter.grad = None
    state.edited.clear()
    state.dirty.clear()
    adoption = Adoption(state, parameters, building=None, is_resumed=True)
    adoption.fill_records()
    if state.parameters is not None:
        adoption.read_parameters()
