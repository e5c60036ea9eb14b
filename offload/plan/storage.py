"""How many bytes of the storage paths a run needs."""

from collections.abc import Iterable
from dataclasses import dataclass

from offload.layout import ModelLayout
from offload.sizes import MIB, format_size, round_up

_MANIFEST_BYTES = 8 * MIB
"""Room for the manifests that are kept: a few hundred bytes for each block of a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePlan:
    """Bytes that the store needs and what is there for them."""

    planned_bytes: int
    free_bytes: int
    capacity_bytes: int | None
    """`tiers.storage.capacity`, where it is set."""

    @property
    def budget_bytes(self) -> int:
        if self.capacity_bytes is None:
            return self.free_bytes
        return min(self.capacity_bytes, self.free_bytes)

    def reasons(self, *, path: str) -> list[str]:
        """Returns why the store does not fit; empty if it does."""
        found: list[str] = []
        if self.planned_bytes > self.free_bytes:
            found.append(
                f"the store does not fit path `{path}`: expected {self.planned_bytes} bytes "
                f"({format_size(self.planned_bytes)}) free, found {self.free_bytes} bytes "
                f"({format_size(self.free_bytes)}); free some space or change "
                "`tiers.storage.paths`"
            )
        if self.capacity_bytes is not None and self.planned_bytes > self.capacity_bytes:
            found.append(
                f"the store does not fit `tiers.storage.capacity`: expected at least "
                f"{self.planned_bytes} bytes ({format_size(self.planned_bytes)}), found "
                f"{self.capacity_bytes} bytes ({format_size(self.capacity_bytes)}); raise "
                "`tiers.storage.capacity`"
            )
        return found


def store_bytes(
    layout: ModelLayout,
    *,
    block_bytes: int,
    durability: str,
    window_bytes: int,
    num_checkpoints: int = 0,
) -> int:
    """Returns the bytes of the store when it is largest.

    Under durability `commit` a committed and a current version of everything live side by side,
    under `none` a current one; what the window of `window_bytes` writes has one more. Every record
    is rewritten in every step, so each checkpoint keeps one more version of everything.
    """
    one_version = sum(round_up(size, block_bytes) for size in _record_sizes(layout))
    versions = 2 + num_checkpoints if durability == "commit" else 1
    return versions * one_version + window_bytes + _MANIFEST_BYTES


def _record_sizes(layout: ModelLayout) -> Iterable[int]:
    for record in layout.records:
        yield record.padded_bytes
    for subgroups in layout.subgroups.values():
        for subgroup in subgroups:
            yield subgroup.padded_parameter_bytes
