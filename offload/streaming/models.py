"""The models of one session: the budget and the store that they share, and a commit of them all."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, StoreError
from offload.memory import Budget
from offload.optim.commit_head import CommitHead
from offload.plan.host import UNBOUNDED_BYTES
from offload.storage.store import BlockStore
from offload.streaming.unit_modules import own_parameters
from offload.streaming.wrap_options import Beside
from offload.streaming.wrapped import WrappedModel

MAIN = ""
"""The name of the model that was wrapped without one: resumes, steps and digests are of it."""


class Models:
    """Wrapped models by name.

    Attributes:
        host_budget: What all of them may lease at one time.
        device_budget: The same on a device with memory of its own.
    """

    def __init__(self, *, host_bytes: int | None, device_bytes: int | None) -> None:
        self.host_budget = Budget(_bytes_of(host_bytes), tier="host")
        self.device_budget = Budget(_bytes_of(device_bytes), tier="device")
        self._host_bytes = host_bytes
        self._device_bytes = device_bytes
        self._by_name: dict[str, WrappedModel] = {}
        # Of the commit that was resumed or loaded: of models that this session does not wrap.
        self._others: dict[str, CommitHead] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def all(self) -> list[WrappedModel]:
        """Returns the models in the order in which they were wrapped."""
        return list(self._by_name.values())

    @property
    def main(self) -> WrappedModel | None:
        """The model without a name, or the first; None where there is none."""
        first = next(iter(self._by_name.values()), None)
        return self._by_name.get(MAIN, first)

    def get(self, name: str) -> WrappedModel | None:
        return self._by_name.get(name) if name else self.main

    def add(self, name: str, model: WrappedModel) -> None:
        self._by_name[name] = model
        model.counters.others = lambda: [m.counters for m in self.all() if m is not model]

    def require_new(self, name: str, model: nn.Module) -> None:
        """Raises unless `name` is free and no model has a parameter of `model`."""
        if name in self._by_name:
            which = f"called `{name}`" if name else "without a name"
            raise StoreError(
                f"cannot wrap a second model {which}: the session has one; pass another `name`, "
                'such as `wrap(model, training=False, name="reference")`'
            )
        # Not `model.parameters()`, which brings back what was evicted while it was built.
        for parameter in (p for module in model.modules() for p in own_parameters(module)):
            if any(other.has(parameter) for other in self._by_name.values()):
                raise StoreError(
                    "cannot wrap a model that shares parameters with one that is wrapped: "
                    "expected parameters of its own; copy the model, or wrap one module that "
                    "holds both"
                )

    @property
    def free_host_bytes(self) -> int | None:
        """What earlier models left of the budget; None: there is no limit."""
        return _left(self._host_bytes, self._taken_host_bytes)

    def parts(self, *, host: int | None, device: int | None) -> dict[str, Any]:
        """Returns the budgets of the next model, as its `WrapOptions` have them.

        Args:
            host: Its part; None: all that earlier models left.
            device: The same on a device with memory of its own.

        Raises:
            ConfigError: A part is larger than what is left.
        """
        taken_device = sum(model.device_plan.planned_bytes for model in self._by_name.values())
        left = self.free_host_bytes, _left(self._device_bytes, taken_device)
        return {
            "budget_bytes": _part(host, left[0], self._host_bytes, tier="host"),
            "device_budget_bytes": _part(device, left[1], self._device_bytes, tier="device"),
            "beside": Beside(
                host_bytes=self._taken_host_bytes,
                device_bytes=taken_device,
                has_host_part=host is not None,
                has_device_part=device is not None,
            ),
        }

    @property
    def _taken_host_bytes(self) -> int:
        return sum(model.plan.planned_bytes for model in self._by_name.values())

    def engine_of(self, parameters: Any) -> WrappedModel:
        """Returns the model that has the first of the optimizer's parameters; else the main one."""
        first = _first_parameter(parameters) if isinstance(parameters, list) else None
        found = [m for m in self._by_name.values() if first is not None and m.has(first)]
        main = self.main
        assert main is not None
        return found[0] if found else main

    def note_resumed(self, head: CommitHead) -> None:
        """Remembers what a commit says of models that this session may not wrap."""
        self._others = dict(head.models)

    def commit(self, store: BlockStore, metadata: Mapping[str, Any]) -> int:
        """Writes what changed in every model, publishes one commit and returns its step.

        Raises:
            StoreError: No model is without a name.
        """
        main = self._by_name.get(MAIN)
        if main is None:
            raise StoreError(
                f"cannot commit models {sorted(self._by_name)}: expected one without a name, whose "
                "step the commit has; wrap the trained model without `name`"
            )
        for model in self._by_name.values():
            model.require_committable()
        heads = {name: model.write_for_commit() for name, model in self._by_name.items()}
        others = {**self._others, **{n: head for n, head in heads.items() if n}}
        head = dataclasses.replace(
            heads[MAIN],
            metadata=dict(metadata),
            models=others,
            torch_threads=torch.get_num_threads(),
        )
        store.commit(head.to_json())
        return main.completed_steps

    def require_in(self, head: CommitHead, *, what: str) -> None:
        """Raises StoreError unless every model is in `head` with the layout that it has."""
        for name, model in self._by_name.items():
            found = head.of(name)
            if found is None:
                raise StoreError(
                    f"cannot load {what}: expected the state of model `{name}`, found that of "
                    f"{sorted(head.models) or 'no model with a name'}; wrap what was saved"
                )
            model.require_layout(found.layout)

    def leave_store(self) -> None:
        """Makes every model ready for the store to change under it."""
        for model in self._by_name.values():
            model.leave_store()

    def roll_back(self, head: CommitHead) -> None:
        """Goes back to `head`, which is current in the store now; after `leave_store`.

        Raises:
            StorageError, CorruptStateError: A transfer failed: no model can be used before this is
                called again and succeeds.
        """
        self.note_resumed(head)
        try:
            for name, model in self._by_name.items():
                found = head.of(name)
                assert found is not None, "checked by `require_in`"
                model.roll_back(found)
        except BaseException as error:  # an interrupt too
            for model in self._by_name.values():
                model.fail(error)
            raise


def _bytes_of(limit: int | None) -> int:
    return UNBOUNDED_BYTES if limit is None else limit


def _left(total: int | None, taken: int) -> int | None:
    return None if total is None else max(total - taken, 0)


def _part(part: int | None, left: int | None, total: int | None, *, tier: str) -> int | None:
    if part is None or left is None:
        return left if part is None else part
    if part > left:
        raise ConfigError(
            f"cannot give a model {part} bytes of `tiers.{tier}.memory`: {left} of {total} are "
            f"left beside those of other models; give each a part that fits, as "
            f"`wrap(model, {tier}_memory=...)`"
        )
    return part


def _first_parameter(parameters: list[Any]) -> torch.Tensor | None:
    for entry in parameters:
        if isinstance(entry, torch.Tensor):
            return entry
        if isinstance(entry, tuple):
            return _first_parameter(list(entry[1:]))
        if isinstance(entry, dict):
            members = entry.get("params", [])
            if isinstance(members, torch.Tensor):
                return members
            entry["params"] = members = list(members)  # a generator is read once
            found = _first_parameter(members)
            if found is not None:
                return found
    return None
