"""What a store is made or opened with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError
from offload.policy import Striping
from offload.sizes import MIB, format_size
from offload.storage.store_directories import check_distinct
from offload.storage.store_paths import PathEngine, StorePath

LEAST_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """The paths of a store, how they are used, and who gives texts for messages.

    Raises:
        ConfigError: Blocks are no multiple of 4096 bytes, or a directory is named twice.
    """

    paths: tuple[StorePath, ...]
    """The first is the root."""
    engines: tuple[PathEngine, ...]
    """By path; the last one serves all further ones."""
    block_bytes: int
    striping: Striping
    describe: Callable[[str], str] | None
    """Gives what a record holds."""
    advise: Callable[[], str]
    """Says from which checkpoint a run can go on; empty: from none."""

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.block_bytes % LEAST_ALIGNMENT:
            raise ConfigError(
                f"cannot make store `{self.root}` with blocks of {self.block_bytes} bytes: "
                f"expected a multiple of {LEAST_ALIGNMENT}; use the default of {format_size(MIB)}"
            )
        check_distinct(self.roots)

    @property
    def root(self) -> Path:
        return self.paths[0].root

    @property
    def roots(self) -> list[Path]:
        """The directories by path."""
        return [path.root for path in self.paths]
