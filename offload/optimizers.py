"""Optimizers alone: for parameters that nobody wrapped, each with a store of its own."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from offload.errors import ConfigError
from offload.optim import adagrad, adam, adamw, lion, sgd
from offload.optim.base import OffloadOptimizer, Parameters
from offload.session import Session

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]


class StandaloneOptimizer(OffloadOptimizer):
    """A `torch.optim.Optimizer` for plain parameters on the CPU, whose state is in a tiered store.

    Parameters and gradients stay in memory and are always there; what updates need beside them is
    read from storage and written back in each step, within `host_memory`. The bits are those of a
    session's optimizer. The whole model is updated at `step()`: nothing runs under other passes.

    Args:
        params: `nn.Parameter`s, (name, parameter) pairs or param_groups, all that there will be.
            The store keeps them by name; without names by position.
        host_memory: Hard budget for parameters, gradients, what is read ahead and the records
            that stay in memory, such as `"24GiB"`.
        paths: Directories on drives: the store has a part on each.
        store: The store's directory, or one on each path; by default one in each of `paths`.
        resume: True goes on from the store's last commit: parameters, state and step counts are
            those of then. `"auto"` does so where there is one. The options are those given here
            until `load_state_dict` sets them.
        codec: `"split"` or `"fp32"`.
        gradient_dtype: `"parameter"` or `"float32"`.
        options: Those of torch's optimizer of that name.

    Attributes:
        session: Keeps the state: `session.stats()`, `session.save(name)` and `session.load(name)`.

    Raises:
        ConfigError: A value or a parameter cannot be taken.
        PlanError: `host_memory` is too small; the message names the smallest.
        StoreError: The store holds a commit and `resume` is not set, or another optimizer's state.
    """

    def __init__(
        self,
        params: Parameters,
        *,
        host_memory: str | int,
        paths: str | Path | Sequence[str | Path] | None = None,
        store: str | Path | Sequence[str | Path] | None = None,
        resume: bool | Literal["auto"] = False,
        codec: str | None = None,
        gradient_dtype: str | None = None,
        **options: Any,
    ) -> None:
        if paths is None and store is None:
            raise ConfigError(
                f"cannot make {self.TITLE} alone: expected a directory in `paths` or `store` for "
                "its state, found neither; name one"
            )
        listed = _listed(params)
        holder = _holder(dict(_named(listed)))
        self.session = Session(
            {"optimizer": self._planned(listed, options)},
            host_memory=host_memory,
            paths=paths,
            store=store,
            resume=resume,
            codec=codec,
            gradient_dtype=gradient_dtype,
            # Nobody but the caller's own code touches parameters: no update may be pending.
            policy={"parameters": "host", "optimizer": "storage", "overlap": "none"},
        )
        self.session.open()
        try:
            self.session.wrap(holder)
            engine = self.session.update_engine(listed)
            super().__init__(listed, engine=engine, **options)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def metadata(self) -> dict[str, Any] | None:
        """What the commit that was resumed was given; None for a new store."""
        return self.session.metadata

    def commit(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Makes parameters and state of now, with `metadata`, what `resume` finds."""
        self.session.commit(metadata)

    def state_digest(self) -> str:
        """Returns one number over parameters and state, equal for equal state however stored."""
        return self.session.state_digest()

    def close(self) -> None:
        """Closes the store; what was not committed is lost, and parameters keep their values.

        After an update that failed these are of two steps, which a warning says: resume from the
        last commit.
        """
        self.session.close()

    def _planned(self, listed: list[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns for which optimizer state is planned, as in a config."""
        del listed, options
        return {"name": self.TITLE.lower()}

    def _check_parameters(self, group: dict[str, Any]) -> None:
        for index, parameter in enumerate(group["params"]):
            if self._engine.name_of(parameter) is None:
                raise ConfigError(
                    f"cannot add parameter {index} of param_group {len(self.param_groups) - 1}, "
                    f"shape {tuple(parameter.shape)}: expected one that the optimizer was made "
                    "with, found another; name all parameters when it is made"
                )


class AdamW(StandaloneOptimizer, adamw.AdamW):
    """AdamW alone: `lr`, `betas`, `eps`, `weight_decay`. See `StandaloneOptimizer`."""


class Adam(StandaloneOptimizer, adam.Adam):
    """Adam alone: `lr`, `betas`, `eps`, `weight_decay`. See `StandaloneOptimizer`."""


class Adagrad(StandaloneOptimizer, adagrad.Adagrad):
    """Adagrad alone; options as in `torch.optim.Adagrad`. See `StandaloneOptimizer`."""


class Lion(StandaloneOptimizer, lion.Lion):
    """Lion alone: `lr`, `betas`, `weight_decay`. See `StandaloneOptimizer`."""


class SGD(StandaloneOptimizer, sgd.SGD):
    """SGD alone; options as in `torch.optim.SGD`. See `StandaloneOptimizer`."""

    def _planned(self, listed: list[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        groups = [group for group in listed if isinstance(group, dict)]
        momenta = [each.get("momentum", 0.0) for each in (options, *groups)]
        momentum = next((each for each in momenta if each), 0.0)
        return {**super()._planned(listed, options), "momentum": momentum}


def _listed(params: Parameters) -> list[Any]:
    """Returns what torch would take, such that it can be gone through twice."""
    if isinstance(params, torch.Tensor):
        raise ConfigError(
            "cannot optimise a tensor: expected parameters, (name, parameter) pairs or "
            "param_groups, found one tensor; pass it in a list"
        )
    return [
        {**each, "params": _members(each.get("params", ()))} if isinstance(each, dict) else each
        for each in params
    ]


def _members(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _named(listed: list[Any]) -> Iterator[tuple[str, nn.Parameter]]:
    seen: set[str] = set()
    members = (m for each in listed for m in (each["params"] if isinstance(each, dict) else [each]))
    for index, member in enumerate(members):
        name, parameter = member if isinstance(member, tuple) else (str(index), member)
        if name in seen:
            raise ConfigError(
                f"cannot keep two parameters `{name}`: expected one of each name; rename one"
            )
        seen.add(name)
        _require_plain(name, parameter)
        yield name, parameter


def _require_plain(name: str, parameter: Any) -> None:
    found = None
    if not isinstance(parameter, nn.Parameter):
        found = f"`{type(parameter).__name__}`"
    elif parameter.device.type != "cpu":
        found = f"one on `{parameter.device}`"
    elif parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size():
        found = "one without memory of its own, such as a wrapped model's"
    if found is not None:
        raise ConfigError(
            f"cannot optimise parameter `{name}` alone: expected a plain `nn.Parameter` on the "
            f"CPU, found {found}; pass plain ones, or use `Session.wrap` and the session's "
            "optimizer"
        )


def _holder(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Returns a module with the parameters by these names, dots as in a model's."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            inside = module._modules.setdefault(part, nn.Module())
            assert inside is not None
            module = inside
        # Not by `register_parameter`: any name will do, such as that of a method.
        module._parameters[leaf] = parameter
    return root
