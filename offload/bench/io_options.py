"""What `offload bench io` is asked to measure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError
from offload.layout.units import TRANSFER_ALIGNMENT
from offload.sizes import GIB, format_size, parse_size
from offload.storage.paths import BACKENDS

PATTERNS = ("write", "read", "rw")
"""In fio's words, in the order in which they are measured; `rw` is half of each at one time."""
DEFAULT_SIZE_BYTES = GIB
DEFAULT_RUNS = 3
DEFAULT_MAX_BYTES = 32 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class IoOptions:
    """The options, checked."""

    paths: tuple[Path, ...]
    size_bytes: int = DEFAULT_SIZE_BYTES
    """Of the file on each path, and of what each measurement moves."""
    patterns: tuple[str, ...] = PATTERNS
    block_bytes: tuple[int, ...] = ()
    """Several are swept; none: what is known of the path, or the engine's default."""
    queue_depths: tuple[int, ...] = ()
    backends: tuple[str, ...] = ("auto",)
    buffered: bool = False
    runs: int = DEFAULT_RUNS
    tune: bool = False
    sustained: bool = False
    max_bytes: int = DEFAULT_MAX_BYTES
    """At most so many are written per path to find the sustained rate."""

    @property
    def sweeps(self) -> bool:
        """Whether more than one setting is tried."""
        several = (self.block_bytes, self.queue_depths, self.backends)
        return self.tune or any(len(values) > 1 for values in several)


def parse_options(
    paths: Sequence[Path],
    *,
    size: str,
    rw: str,
    bs: str | None,
    iodepth: str | None,
    ioengine: str,
    buffered: bool,
    runs: int,
    tune: bool,
    sustained: bool,
    max_bytes: str | None,
) -> IoOptions:
    """Returns the options from the words of the command line.

    Raises:
        ConfigError: One of them makes no sense.
    """
    options = IoOptions(
        paths=tuple(_parse_path(path) for path in paths),
        size_bytes=_parse_bytes("--size", size),
        patterns=_parse_patterns(rw),
        block_bytes=tuple(_parse_bytes("--bs", each) for each in _split(bs)),
        queue_depths=tuple(_parse_depth(each) for each in _split(iodepth)),
        backends=tuple(_parse_backend(each) for each in _split(ioengine)),
        buffered=buffered,
        runs=runs,
        tune=tune,
        sustained=sustained,
        max_bytes=DEFAULT_MAX_BYTES
        if max_bytes is None
        else _parse_bytes("--max-bytes", max_bytes),
    )
    if max_bytes is not None and not sustained:
        raise _wrong("--max-bytes", "`--sustained` beside it", "none")
    _check(options)
    return options


def _check(options: IoOptions) -> None:
    if options.runs < 1:
        raise _wrong("--runs", "1 or more", options.runs)
    if len(set(options.paths)) != len(options.paths):
        raise _wrong("PATH", "each path once", ", ".join(map(str, options.paths)))
    if options.tune and options.patterns != PATTERNS:
        found = ",".join(options.patterns)
        raise _wrong("--rw", f"{','.join(PATTERNS)} with `--tune`, which notes all of them", found)
    unaligned = [size for size in options.block_bytes if size % TRANSFER_ALIGNMENT]
    if options.tune and unaligned:
        expected = f"multiples of {TRANSFER_ALIGNMENT} with `--tune`, as runs take what is best"
        raise _wrong("--bs", expected, ", ".join(map(str, unaligned)))
    largest = max(options.block_bytes, default=0)
    if options.size_bytes < max(largest, 1 << 20):
        raise _wrong("--size", "1 MiB or more, and not less than --bs", options.size_bytes)


def _parse_path(path: Path) -> Path:
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        raise _wrong("PATH", f"a directory at `{path}`", found)
    return path.absolute()


def _parse_patterns(text: str) -> tuple[str, ...]:
    wanted = _split(text)
    if not wanted or any(each not in PATTERNS for each in wanted):
        raise _wrong("--rw", f"some of {','.join(PATTERNS)}", text)
    return tuple(each for each in PATTERNS if each in wanted)


def _parse_bytes(option: str, text: str) -> int:
    try:
        value = parse_size(text)
    except (ValueError, TypeError):
        value = 0
    if value < 1:
        raise _wrong(option, "a size such as `128KiB` or `1GiB`", text)
    return value


def _parse_depth(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise _wrong("--iodepth", "1 to 1024", text)
    return int(text)


def _parse_backend(text: str) -> str:
    if text not in ("auto", *BACKENDS):
        raise _wrong("--ioengine", f"`auto` or some of {','.join(BACKENDS)}", text)
    return text


def _split(text: str | None) -> list[str]:
    return [each.strip() for each in (text or "").split(",") if each.strip()]


def _wrong(option: str, expected: str, found: object) -> ConfigError:
    shown = format_size(found) if isinstance(found, int) and found > 1024 else found
    return ConfigError(
        f"cannot run the benchmark with `{option}`: expected {expected}, found {shown}; correct "
        "it (`offload bench io --help`)"
    )
