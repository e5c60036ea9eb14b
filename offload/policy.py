"""What a policy decides, as protocols, and how a policy is found by its name.

A policy is pure: it decides from its arguments alone, and others carry out what it decides.
"""

import importlib
from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

from offload.errors import ConfigError


@runtime_checkable
class Order(Protocol):
    """Decides in which order an update takes the records, and which stay in memory after it."""

    @property
    def name(self) -> str:
        """The name under which `policy.order` selects it."""

    def sequence(self, num_records: int, step: int) -> Sequence[int]:
        """Returns each of 0 to `num_records - 1` once, in the order of step `step`, from 1."""

    def kept(self, num_records: int, capacity: int, step: int) -> frozenset[int]:
        """Returns at most `capacity` records that stay in memory when step `step` has ended."""


def resolve_order(name: str) -> Order:
    """Returns the order that is called `name`.

    Raises:
        ConfigError: There is no such order.
    """
    # By name at run time: no code depends on a policy, only on what policies promise.
    orders = importlib.import_module("offload.policies.order").ORDERS
    if name not in orders:
        raise ConfigError(
            f"cannot resolve `policy.order`: expected {_names(orders)}, found `{name}`; "
            "change `policy.order`"
        )
    return cast(Order, orders[name]())


def _names(known: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in known)
