"""How many bytes of activations a run spills to storage, before it has run: from shapes alone."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offload.config import Config
from offload.plan.activations import plan_activations
from offload.runs.model import build_meta_model, build_model
from offload.sizes import round_up
from offload.streaming.activations import SMALLEST_SHARE
from offload.streaming.discovery import discover_units
from offload.streaming.torch_private import tensors_without_memory
from offload.streaming.unit_modules import UnitRules

_LOG = logging.getLogger("offload.runs")


def spilled_bytes(config: Config) -> int | None:
    """Returns the most bytes of spill files; None for a model that can't be run on shapes alone.

    The forward pass of one micro-step is run on tensors without memory, and what autograd saves is
    counted by the rules by which it would be moved away.
    """
    asked = config.activations
    if not config.offload or asked.offload != "storage":
        return 0
    plan = plan_activations("storage", memory_bytes=asked.memory, threshold_bytes=asked.threshold)
    try:
        sizes = _moved_sizes(config)
    except Exception as error:  # noqa: BLE001 - whatever a model of the user's does on shapes
        _LOG.debug("what is spilled can't be told from shapes: %r", error)
        return None
    return sum(round_up(size, plan.slot_bytes) for size in sizes)


def _moved_sizes(config: Config) -> list[int]:
    checkpoints = _checkpointed_modules(config)
    with tensors_without_memory(), torch.random.fork_rng(devices=[]):
        model = build_model(config.model).train()
        saved = _Saved(model, threshold_bytes=config.activations.threshold)
        tokens = torch.zeros(config.train.batch, config.model.context, dtype=torch.int64)
        with contextlib.ExitStack() as stack:
            for name in checkpoints:
                stack.enter_context(saved.checkpoint(model.get_submodule(name)))
            stack.enter_context(saved.counting())
            model(tokens, tokens)
        return [storage.nbytes() for storage in saved.storages.values()]


def _checkpointed_modules(config: Config) -> list[str]:
    if config.activations.checkpoint != "unit":
        return []
    model = build_meta_model(config.model)
    units = discover_units(model, UnitRules.of(config.units)).units
    elements = {module for unit in units if unit.is_element for module in unit.modules}
    return [name for name, module in model.named_modules() if module in elements]


class _Saved:
    """The storages that autograd saves and that would be moved.

    Attributes:
        storages: By address; kept, so that no other one gets it.
    """

    def __init__(self, model: nn.Module, *, threshold_bytes: int) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        own = [*model.parameters(), *model.buffers()]
        self._stays = frozenset(
            each.untyped_storage()._cdata for each in own if each.layout is torch.strided
        )
        self._threshold_bytes = threshold_bytes
        self._depth = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if not self._depth:
                self._note(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    @contextlib.contextmanager
    def checkpoint(self, module: nn.Module) -> Iterator[None]:
        """Of a call of `module` only the inputs are saved."""

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in () if self._depth else (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    self._note(value)
            self._depth += 1

        def leave(*_: Any) -> None:
            self._depth -= 1

        before = module.register_forward_pre_hook(enter, with_kwargs=True)
        after = module.register_forward_hook(leave)
        with before, after:
            yield

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        is_most_of_it = tensor.numel() * tensor.element_size() * SMALLEST_SHARE >= num_bytes
        if num_bytes < self._threshold_bytes or not is_most_of_it:
            return
        if storage._cdata not in self._stays:
            self.storages[storage._cdata] = storage
