"""What the optimizers share: parameters of a wrapped model, state in the tiered store."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, overload

import torch
from torch import nn

from offload.errors import ConfigError, StoreError
from offload.optim.gradient import Accumulator
from offload.optim.pipeline import ParameterUpdate
from offload.optim.scalars import Scalars
from offload.optim.whole import WholeUpdate

_Known = dict[int | None, ParameterUpdate]
"""Updates of a param_group by the parameter's own step; None: of whole matrices."""

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]

_NEVER = {
    "amsgrad": "a third moment is kept nowhere; leave `amsgrad` out",
    "maximize": "gradients are not negated; negate the loss",
    "foreach": "the update is one fused pass already; leave `foreach` out",
    "fused": "the update is one fused pass already; leave `fused` out",
    "capturable": "updates are not part of a CUDA graph; leave `capturable` out",
    "differentiable": "updates cannot be differentiated; leave `differentiable` out",
    "decoupled_weight_decay": "use `AdamW` for decoupled weight decay",
}
"""Options of torch's optimizers that are accepted only as None or False, and why."""


class UpdateEngine(Protocol):
    """What an optimizer asks of the session that keeps its state.

    Attributes:
        completed_steps: Of the optimizer, those before a resume included.
    """

    def use_rule(self, rule: str, *, takes_whole: bool) -> None:
        """Lays the state out for `rule`; refuses where there is another one's already.

        Args:
            rule: Of the kernels.
            takes_whole: Whether the optimizer updates whole matrices.
        """
        ...

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Returns the name under which the engine keeps `parameter`, or None."""
        ...

    def is_whole(self, name: str) -> bool:
        """Tells whether the parameter is laid out to be updated as a whole matrix."""
        ...

    def accumulator_of(self, parameter: nn.Parameter) -> Accumulator | None:
        """Returns the gradient to apply, or None if the parameter has none in this step."""
        ...

    @property
    def completed_steps(self) -> int: ...

    def step_of(self, name: str) -> int:
        """Returns how many updates the parameter has had."""
        ...

    def follow(self, update_of: Callable[[nn.Parameter], ParameterUpdate | None]) -> None:
        """Takes what gives the update that a step would apply to a parameter now."""
        ...

    def apply(self, updates: dict[str, ParameterUpdate]) -> None:
        """Updates the named parameters and counts one completed optimizer step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Which values an option may have."""

    least: float = 0.0
    below: float = float("inf")

    def __contains__(self, value: float) -> bool:
        return self.least <= value < self.below

    def __str__(self) -> str:
        if self.below == float("inf"):
            return f"{self.least:g} or more"
        return f"between {self.least:g} and {self.below:g}, {self.below:g} excluded"


class OffloadOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose state lives in the tiered store.

    A parameter without a gradient is not touched: no decay, no step. Options may differ by
    param_group and be edited between steps. `docs/numerics.md` has the arithmetic.

    Args:
        params: Parameters, (name, parameter) pairs or param_groups of a wrapped model.
        engine: Keeps the state and applies the updates.
        defaults: The optimizer's own options.
        others: Options of torch's optimizer of that name that have no effect here: only None
            and False are accepted.

    Raises:
        ConfigError: A value is out of range, an option is not supported, or a parameter does
            not belong to a wrapped model.
        StoreError: The store holds the state of another optimizer.
    """

    TITLE: ClassVar[str]
    """The optimizer's name in messages, as torch has it."""

    TAKES_WHOLE: ClassVar[bool] = False
    """Whether it updates whole matrices by `whole_update`."""

    BOUNDS: ClassVar[Mapping[str, Bounds]]
    """The numbers among the options; of a pair each member."""

    def __init__(
        self,
        params: Parameters,
        *,
        engine: UpdateEngine,
        defaults: dict[str, Any],
        others: Mapping[str, Any],
    ) -> None:
        self._engine = engine
        self._refuse(others)
        self._options = frozenset(defaults)
        super().__init__(params, defaults)
        engine.use_rule(self.rule(), takes_whole=self.TAKES_WHOLE)
        engine.follow(self._update_now)

    def rule(self) -> str:
        """Returns the update rule of the kernels, given the param_groups."""
        raise NotImplementedError

    def scalars(self, group: dict[str, Any], step: int) -> Scalars:
        """Returns the scalars of a parameter of `group` in its own step `step`, from 1."""
        raise NotImplementedError

    def whole_update(self, group: dict[str, Any]) -> WholeUpdate | None:
        """Returns how whole matrices of `group` are updated; None: by the kernels."""
        del group
        return None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of a wrapped model with options of their own."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
            self._check_parameters(group)
        except ConfigError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient; returns what `closure` returned."""
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: dict[str, ParameterUpdate] = {}
        for group in self.param_groups:
            known: _Known = {}
            for parameter in group["params"]:
                name = self._engine.name_of(parameter)
                accumulator = self._engine.accumulator_of(parameter)
                if name is not None and accumulator is not None:
                    updates[name] = self._update_of(group, name, accumulator, known)
        self._engine.apply(updates)
        # A region of autocast that goes on keeps casts of the values that were there before.
        torch.clear_autocast_cache()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the options of the param_groups, such as for the metadata of a commit.

        It is as torch's, with an empty `state`, which is in the store, and with `step`: after how
        many steps it was taken.
        """
        return {**super().state_dict(), "step": self._engine.completed_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the options of the param_groups to those of a `state_dict` of this step.

        As with torch's optimizers, make a scheduler before: making one sets the options too.

        Raises:
            StoreError: It was taken after another number of steps than the store's state, or is
                that of an optimizer with its state in memory.
            ConfigError: It lacks an option of this optimizer.
            ValueError: Its param_groups are not as many, or as long, as the optimizer's.
        """
        done = self._engine.completed_steps
        if state_dict.get("state") or state_dict.get("step") != done:
            found = "state in memory" if state_dict.get("state") else "options alone"
            raise StoreError(
                f"cannot load a `state_dict` into {self.TITLE} after {done} steps: expected the "
                f"options of step {done}, found {found}, of step {state_dict.get('step')}; the "
                "state is in the store: open it with `resume=True` at the commit in whose "
                "metadata the `state_dict` is"
            )
        groups = [self._like_own(group) for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _update_now(self, parameter: nn.Parameter) -> ParameterUpdate | None:
        """Returns what a step would apply to `parameter` now; None where it has no gradient."""
        name, accumulator = self._engine.name_of(parameter), self._engine.accumulator_of(parameter)
        if name is None or accumulator is None:
            return None
        for group in self.param_groups:
            if any(each is parameter for each in group["params"]):
                return self._update_of(group, name, accumulator, {})
        return None

    def _update_of(
        self, group: dict[str, Any], name: str, accumulator: Accumulator, known: _Known
    ) -> ParameterUpdate:
        """Returns the update of a parameter; `known` are those of its group without factors."""
        if not known:
            self._refuse({option: group[option] for option in sorted(_NEVER.keys() & group.keys())})
        step = None if self._engine.is_whole(name) else self._engine.step_of(name) + 1
        update = known.get(step)
        if update is None:
            update = known[step] = self._new_update(group, step)
        return replace(update, scales=tuple(accumulator.scales)) if accumulator.scales else update

    def _new_update(self, group: dict[str, Any], step: int | None) -> ParameterUpdate:
        """Returns the update in a parameter's own step; None: of a whole matrix."""
        if step is None:
            return ParameterUpdate(scales=(), whole=self.whole_update(group))
        return ParameterUpdate(scales=(), scalars=self.scalars(group, step))

    def _refuse(self, others: Mapping[str, Any]) -> None:
        for name, value in others.items():
            if name not in _NEVER:
                raise ConfigError(
                    f"cannot make {self.TITLE} with option `{name}`: it has none of that name; "
                    "leave it out"
                )
            if value:
                raise ConfigError(
                    f"cannot use {self.TITLE} with `{name}` = {value}: {_NEVER[name]}"
                )

    def _like_own(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of a `state_dict`'s group with pairs as tuples, which JSON lacks."""
        missing = sorted(self._options - group.keys())
        if missing:
            raise ConfigError(
                f"cannot load a `state_dict` into {self.TITLE}: expected an option "
                f"`{missing[0]}`, found {sorted(group)}; load that of the same optimizer"
            )
        pairs = {name: group[name] for name in self._options if isinstance(group[name], list)}
        return {**group, **{name: tuple(pair) for name, pair in pairs.items()}}

    def _check_options(self, group: dict[str, Any]) -> None:
        for name, bounds in self.BOUNDS.items():
            given = group[name]
            for value in given if isinstance(given, (tuple, list)) else (given,):
                if float(value) not in bounds:
                    raise ConfigError(
                        f"cannot make {self.TITLE} with `{name}` = {given}: expected {bounds}; "
                        f"correct `{name}`"
                    )
        known = self._options | {"params", "param_names", "initial_lr"}
        self._refuse({name: group[name] for name in sorted(group.keys() - known)})

    def _check_parameters(self, group: dict[str, Any]) -> None:
        for index, parameter in enumerate(group["params"]):
            if self._engine.name_of(parameter) is None:
                raise ConfigError(
                    f"cannot optimise parameter {index} of param_group "
                    f"{len(self.param_groups) - 1}, shape {tuple(parameter.shape)}: expected "
                    "a trainable parameter of a wrapped model, found another tensor; call "
                    "`session.wrap(model)` first and pass `model.parameters()` after it"
                )
