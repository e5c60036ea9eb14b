"""How the I/O engine works on each path."""

from dataclasses import dataclass
from pathlib import Path

from offload._native import aio
from offload.errors import ConfigError
from offload.sizes import MIB
from offload.storage.faults import FaultPlan

BACKENDS = ("io_uring", "libaio", "threads", "aiofiles")
"""In the order in which `auto` tries them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSettings:
    """The queue of one path: its files lie in `root` or below."""

    root: Path | None
    """None: the files of no other path."""
    backend: str = "auto"
    """A name of `BACKENDS`, or `auto` for the first that this machine has, or `fault`."""
    queue_depth: int = 8
    """Pieces in flight, 1 to 1024; also the threads of `threads`, `aiofiles` and `fault`."""
    block_bytes: int = MIB
    """Bytes per piece, up to 1 GiB; a multiple of the files' alignment."""
    faults: FaultPlan | None = None
    """Of `fault` only."""

    def check(self) -> None:
        """Raises ConfigError if a value is out of range."""
        if self.backend not in ("auto", "fault", *BACKENDS):
            raise ConfigError(
                f"cannot make an I/O engine with backend `{self.backend}`: expected `auto` or one "
                f"of {', '.join(BACKENDS)}; choose one of them"
            )
        if self.faults is not None and self.backend != "fault":
            raise ConfigError(
                f"cannot make an I/O engine with backend `{self.backend}` and faults: expected "
                "`fault`, which alone carries them out; name it or leave the faults out"
            )
        _check_range("queue_depth", self.queue_depth, aio.MAX_QUEUE_DEPTH)
        _check_range("block_bytes", self.block_bytes, aio.MAX_BLOCK_BYTES)


def _check_range(name: str, value: int, largest: int) -> None:
    if not 1 <= value <= largest:
        raise ConfigError(
            f"cannot make an I/O engine with `{name}` {value}: expected 1 to {largest}; change it"
        )
