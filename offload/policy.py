"""What a policy decides, as protocols, and how a policy is found by its name.

A policy is pure: it decides from its arguments alone, and others carry out what it decides.
"""

import importlib
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

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


@runtime_checkable
class Overlap(Protocol):
    """Decides which record is updated next while a pass runs, and which are read ahead.

    Records are numbered in layout order, as units are.
    """

    @property
    def name(self) -> str:
        """The name under which `policy.overlap` selects it."""

    def sequence(self, units: Sequence[Sequence[int]], upcoming: Sequence[int]) -> Sequence[int]:
        """Returns the order in which records are updated if the pass goes as expected.

        Args:
            units: Those of each record.
            upcoming: The units of the pass to come, by first use, as far as it is known.
        """

    def choose(self, waiting: Sequence[int], needed: Collection[int]) -> int:
        """Returns which of the `waiting` records, in that order, comes next.

        Args:
            waiting: At least one.
            needed: Those that the pass waits for now.
        """

    def prefetched(
        self,
        sequence: Sequence[int],
        *,
        cached: Container[int],
        capacity: int,
        num_places: int,
    ) -> Sequence[int]:
        """Returns which records to read before their update is asked for.

        They wait in the window for their turn, so they leave a place for those in memory that come
        before one of them.

        Args:
            sequence: Of all records that are updated.
            cached: Records that are in memory.
            capacity: The most records that there are buffers for.
            num_places: The most that are in the window at one time, with those from memory.
        """


def resolve_overlap(name: str) -> Overlap | None:
    """Returns the overlap that is called `name`; None where no update runs under a forward.

    Raises:
        ConfigError: There is no such overlap.
    """
    if name in ("none", "backward"):
        return None
    overlaps = importlib.import_module("offload.policies.overlap").OVERLAPS
    if name not in overlaps:
        raise ConfigError(
            "cannot resolve `policy.overlap`: expected "
            f"{_names(['none', 'backward', *overlaps])}, found `{name}`; change `policy.overlap`"
        )
    return cast(Overlap, overlaps[name]())


@dataclass(frozen=True, slots=True, kw_only=True)
class PathState:
    """What a striping policy knows of one storage path when a record is about to be written."""

    available_blocks: int
    """Free blocks, those included by which its data file can still grow; 0: take none."""
    block_bytes: int
    queued_bytes: int
    """Submitted and not done, both ways."""
    queued_write_bytes: int
    """Of these what is to be written: the queue that a new block joins."""
    round_trip_bytes_per_s: float | None
    """Bytes that go in and out again each second, as measured lately; None: not yet known."""
    nominal_bytes_per_s: float | None
    """The same from the machine's profile; None: there is none."""


@runtime_checkable
class Striping(Protocol):
    """Decides which share of each record goes to which path.

    An object serves one store: it may remember what it decided before.
    """

    @property
    def name(self) -> str:
        """The name under which `policy.striping` selects it."""

    def split(self, num_blocks: int, paths: Sequence[PathState]) -> Sequence[int]:
        """Returns the blocks of a new version by path; together `num_blocks`.

        What a path has no room for goes to the others, whatever is decided here.
        """


def resolve_striping(name: str, *, num_paths: int | None = None) -> Striping:
    """Returns a new striping that is called `name`; `modulo` may have a ratio: `modulo:2:1`.

    Args:
        name: Of the striping.
        num_paths: For how many paths it is; None: that shows later.

    Raises:
        ConfigError: There is no such striping, or its ratio is none, or one for other paths.
    """
    known: dict[str, Any] = importlib.import_module("offload.policies.striping").STRIPINGS
    stem, _, text = name.partition(":")
    ratio = tuple(text.split(":")) if text else ()
    is_ratio = all(part.isdecimal() and int(part) > 0 for part in ratio)
    if stem not in known or not is_ratio or (":" in name and (stem != "modulo" or not ratio)):
        raise ConfigError(
            f"cannot resolve `policy.striping`: expected {_names(list(known))}, or a ratio such "
            f"as `modulo:2:1`, found `{name}`; change `policy.striping`"
        )
    if ratio and num_paths is not None and len(ratio) != num_paths:
        raise ConfigError(
            f"cannot stripe by `{name}`: expected one number for each path, of which there "
            f"{'is 1' if num_paths == 1 else f'are {num_paths}'}, found {len(ratio)}; change "
            "`policy.striping`"
        )
    return cast(Striping, known[stem](*map(int, ratio)))


def _names(known: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in known)
