"""Values that the schema knows and this version does not carry out: refused, never ignored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from offload.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One value that cannot be used, for a message."""

    key: str
    expected: str
    found: object


OPTIMIZER_OPTIONS = {
    "adamw": ("betas", "eps"),
    "adam": ("betas", "eps"),
    "adagrad": ("eps",),
    "lion": ("betas",),
    "sgd": ("momentum", "nesterov"),
    "muon": ("betas", "eps", "momentum", "nesterov", "matrices"),
}
"""The keys of `optimizer` that only some have, by the optimizer's name."""
_UNUSUAL_OPTIONS = frozenset({"momentum", "nesterov", "matrices"})
"""Of those, what is not set in most files: so that `optimizer.name` alone may be overridden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dependent:
    """A key that does nothing, at whatever value, without another."""

    key: str
    is_used: Callable[[Config], bool]
    without: str
    """What there is none of then."""


_DEPENDENT = (
    _Dependent(
        key="checkpoint.drain_rate_limit",
        is_used=lambda config: config.checkpoint.drain is not None,
        without="no checkpoint is copied without `checkpoint.drain`",
    ),
    *(
        _Dependent(
            key=f"activations.{name}",
            is_used=lambda config: config.activations.offload != "none",
            without='no activation moves with `activations.offload = "none"`',
        )
        for name in ("threshold", "memory")
    ),
    _Dependent(
        key="optimizer.nesterov",
        is_used=lambda config: config.optimizer.name != "sgd" or bool(config.optimizer.momentum),
        without="`sgd` without `optimizer.momentum` has none to look ahead by",
    ),
)
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "policy.order": ("sequential", "alternating", "resident"),
}


def unsupported_values(config: Config) -> Iterator[Problem]:
    """Yields what `config` asks for and this version, or this combination, cannot do."""
    for key, allowed in _SUPPORTED.items():
        found = _lookup(config, key)
        if found not in allowed:
            yield Problem(key=key, expected=f"{_one_of(allowed)} in this version", found=found)
    policy = config.policy
    if policy.overlap != "none" and policy.order != "resident":
        yield Problem(
            key="policy.order",
            expected=f'`"resident"` with `policy.overlap = "{policy.overlap}"`, as the order is '
            "then the pass's own",
            found=policy.order,
        )
    yield from _idle_problems(config)
    yield from _early_problems(config)
    yield from _tier_problems(config)


def _idle_problems(config: Config) -> Iterator[Problem]:
    """What was set and would do nothing."""
    for each in _DEPENDENT:
        if not _is_default(config, each.key) and not each.is_used(config):
            yield _idle(config, each.key, because=each.without)
    name = config.optimizer.name
    for option in sorted(_UNUSUAL_OPTIONS.difference(OPTIMIZER_OPTIONS[name])):
        key = f"optimizer.{option}"
        if not _is_default(config, key):
            yield _idle(config, key, because=f'`optimizer.name = "{name}"` has no such option')


def _idle(config: Config, key: str, *, because: str) -> Problem:
    return Problem(key=key, expected=f"nothing, as {because}", found=_lookup(config, key))


def _is_default(config: Config, key: str) -> bool:
    section, name = key.rsplit(".", 1)
    default: object = type(_lookup(config, section)).model_fields[name].default
    return bool(_lookup(config, key) == default)


def _early_problems(config: Config) -> Iterator[Problem]:
    """What updates under backward cannot do."""
    overlap = config.policy.overlap
    if overlap not in ("backward", "both"):
        return
    given = f'with `policy.overlap = "{overlap}"`'
    if config.train.max_grad_norm:
        yield Problem(
            key="train.max_grad_norm",
            expected=f"0 {given}, as a global norm is known only after the last gradient",
            found=config.train.max_grad_norm,
        )
    for key in ("policy.parameters", "policy.optimizer"):
        if _lookup(config, key) != "storage":
            yield Problem(
                key=key,
                expected=f'`"storage"` {given}, as new values wait there for the step',
                found=_lookup(config, key),
            )


def _tier_problems(config: Config) -> Iterator[Problem]:
    tiers = config.tiers
    if tiers.device.kind == "cpu" and tiers.device.memory is not None:
        yield Problem(
            key="tiers.device.memory",
            expected="nothing, as on device `cpu` the budget is `tiers.host.memory`",
            found=tiers.device.memory,
        )
    for key in ("link_rate", "link_latency"):
        value = getattr(tiers.device, key)
        if value is not None and tiers.device.kind != "emulated":
            yield Problem(
                key=f"tiers.device.{key}",
                expected="nothing, as only device `emulated` has a link of a chosen rate",
                found=value,
            )
    if config.checkpoint.save_every and tiers.storage.durability == "none":
        yield Problem(
            key="checkpoint.save_every",
            expected='0 with `tiers.storage.durability = "none"`',
            found=config.checkpoint.save_every,
        )
    if config.offload and tiers.host.memory is None:
        yield Problem(
            key="tiers.host.memory",
            expected='a budget such as `"400MiB"`, or `offload = false`',
            found=None,
        )


def _lookup(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _one_of(allowed: tuple[object, ...]) -> str:
    names = [
        "nothing" if value is None else f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
        for value in allowed
    ]
    return " or ".join(names)
