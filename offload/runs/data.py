"""Text as bytes: where a run's data comes from and how batches are cut from it."""

import glob
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.errors import ConfigError

NUM_VALIDATION_WINDOWS = 16

_LEFT_OUT_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
)
_SEPARATOR = b"\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Token indices and the tokens that follow them, both int64 (batch, context)."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Bytes to train on and bytes to validate with, each a uint8 array."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]

    def check(self, *, context: int) -> None:
        """Refuses text that holds no whole window of `context` tokens and the one after.

        Raises:
            ConfigError: A part is too short.
        """
        for name, part in (("training", self.train), ("validation", self.validation)):
            if len(part) < context + 1:
                raise ConfigError(
                    f"cannot cut windows from the {name} text: needs at least {context + 1} bytes "
                    f"(`model.context` + 1), found {len(part)}; add files to `data.files`, "
                    "lower `model.context` or change `data.validation_fraction`"
                )

    def train_batch(
        self, *, seed: int, step: int, micro_step: int, batch: int, context: int
    ) -> Batch:
        """Returns the batch of one micro-step; `step` and `micro_step` count from 0."""
        generator = np.random.default_rng([seed, step, micro_step])
        starts = generator.integers(0, len(self.train) - context, size=batch)
        return _cut(self.train, [int(start) for start in starts], context=context)

    def validation_batches(self, *, batch: int, context: int) -> Iterator[Batch]:
        """Yields the fixed windows of validation, at most `batch` of them at a time."""
        stride = (len(self.validation) - context - 1) // (NUM_VALIDATION_WINDOWS - 1)
        for first in range(0, NUM_VALIDATION_WINDOWS, batch):
            windows = range(first, min(first + batch, NUM_VALIDATION_WINDOWS))
            yield _cut(self.validation, [j * stride for j in windows], context=context)


def open_text(source: str, *, files: Sequence[str], validation_fraction: float) -> Text:
    """Returns the text of `source`: the last `validation_fraction` of its bytes validates.

    Args:
        source: `python-stdlib` (the standard library of the running Python) or `files`.
        files: The files of source `files`, in this order; a glob gives its matches, sorted.
        validation_fraction: Between 0 and 1, both excluded.

    Raises:
        ConfigError: The source is unknown, or a file is missing or can't be read.
    """
    if source == "python-stdlib":
        paths = standard_library_files(Path(sysconfig.get_path("stdlib")))
    elif source == "files":
        paths = [path for pattern in files for path in _matching(pattern)]
    else:
        raise ConfigError(
            f"unknown `data.source`: expected `python-stdlib` or `files`, found `{source}`"
        )
    if not paths:
        raise ConfigError(
            f"no data for source `{source}`: expected at least one file, found none; "
            "set `data.files`"
        )
    joined = np.frombuffer(_SEPARATOR.join(_read_all(paths)), dtype=np.uint8)
    num_train = int(len(joined) * (1.0 - validation_fraction))
    return Text(train=joined[:num_train], validation=joined[num_train:])


def standard_library_files(root: Path) -> list[Path]:
    """Returns the `*.py` files under `root` without tests and packages installed later."""
    relative = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [path for path in relative if not _LEFT_OUT_DIRECTORIES.intersection(path.parts[:-1])]
    kept.sort(key=lambda path: path.as_posix())
    return [root / path for path in kept if (root / path).is_file()]


def _matching(pattern: str) -> list[Path]:
    if not glob.has_magic(pattern) or Path(pattern).exists():
        return [Path(pattern)]
    found = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    if not found:
        raise ConfigError(
            f"no data for glob `{pattern}`: expected at least one file, found none; "
            "correct `data.files`"
        )
    return [Path(path) for path in found]


def _read_all(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        try:
            if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
                raise ConfigError(
                    f"cannot read data file `{path}`: expected a file of text, found a device, a "
                    "pipe or a socket, which may have no end; correct `data.files`"
                )
            yield path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read data file `{path}`: expected a readable file, "
                f"found {error.strerror or error}; correct `data.files`"
            ) from error


def _cut(text: NDArray[np.uint8], starts: Sequence[int], *, context: int) -> Batch:
    windows = np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64)
    return Batch(
        inputs=torch.from_numpy(windows[:, :-1].copy()),
        targets=torch.from_numpy(windows[:, 1:].copy()),
    )
