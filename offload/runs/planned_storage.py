"""What a run takes of its storage paths: where they are, how much space, what threatens them."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from offload.config import Config
from offload.errors import ConfigError
from offload.layout import ModelLayout
from offload.plan.host import HostPlan
from offload.plan.storage import BLOCK_BYTES, StoragePath, StoragePlan, store_space, usable_bytes
from offload.storage.drain_target import existing_directory, shared_path


def require_writable_paths(config: Config, stores: Sequence[Path]) -> None:
    """Raises ConfigError unless stores, and copies of checkpoints, can be written where they go."""
    _check_paths(config.tiers.storage.paths)
    directories = existing_directories(config, stores)
    writable = [_is_writable(directory) for directory in directories]
    for index, directory in enumerate(directories):
        # A store that is gone on with leaves out what cannot be written any more.
        is_part_of_store = bool(stores) and directory == stores[index] and any(writable)
        if not writable[index] and not is_part_of_store:
            raise ConfigError(
                f"cannot store a run under `{directory}`: expected a writable directory, found one "
                "that is read-only or belongs to another user, or a file; choose another "
                "`--run-dir` or `tiers.storage.paths`"
            )
    drain = config.checkpoint.drain
    if drain is not None and not _is_writable(existing_directory(Path(drain))):
        raise ConfigError(
            f"cannot copy checkpoints to `checkpoint.drain` `{drain}`: expected a directory that "
            "can be made or written, found one that is read-only or belongs to another user, or a "
            "file; choose another, or leave it out"
        )


def _check_paths(paths: Sequence[str]) -> None:
    for path in paths:
        if not Path(path).is_dir():
            raise ConfigError(
                f"cannot use `tiers.storage.paths` entry `{path}`: expected a directory, found "
                f"{'a file' if Path(path).exists() else 'nothing'}; make it or correct the path"
            )
    resolved = [Path(path).resolve() for path in paths]
    for path, directory in zip(paths, resolved, strict=True):
        if resolved.count(directory) > 1:
            raise ConfigError(
                f"cannot use `tiers.storage.paths` entry `{path}`: expected each directory once, "
                f"found {resolved.count(directory)} that are `{directory}`; leave one out"
            )


def _is_writable(directory: Path) -> bool:
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)


def plan_storage(
    config: Config,
    layout: ModelLayout,
    host: HostPlan,
    stores: Sequence[Path],
    spill_bytes: int,
) -> StoragePlan:
    """Returns the space that the run's store takes, and what the paths have.

    Args:
        config: Of the run.
        layout: Of the model.
        host: How the host budget is cut.
        stores: Where the store goes on each path; none: below the current directory.
        spill_bytes: Of activations that move there.
    """
    tier = config.tiers.storage
    paths = []
    for index, directory in enumerate(existing_directories(config, stores)):
        usage = shutil.disk_usage(directory)
        path = StoragePath(
            device=directory.stat().st_dev,
            total_bytes=usage.total,
            free_bytes=usage.free,
            taken_bytes=_bytes_below(stores[index] if stores else None),
            capacity_bytes=tier.capacity_of(index),
        )
        paths.append(path)
    return StoragePlan(
        space=store_space(
            layout,
            block_bytes=BLOCK_BYTES,
            durability=tier.durability,
            num_buffers=host.num_written_at_once,
            num_checkpoints=num_kept_checkpoints(config),
            is_staged=config.policy.overlap in ("backward", "both"),
            spill_bytes=spill_bytes + host.gradients.space_bytes,
        ),
        free_bytes=usable_bytes([replace(path, capacity_bytes=None) for path in paths]),
        capacity_bytes=usable_bytes(paths) if tier.capacity else None,
    )


def storage_warnings(
    config: Config, directories: Sequence[Path], spilled: int | None
) -> Iterator[str]:
    """Yields what makes the run's state less safe than it could be.

    Args:
        config: Of the run.
        directories: Those of its paths that are there.
        spilled: Bytes of activations on storage; None: not known.
    """
    tier, drain, saves = config.tiers.storage, config.checkpoint.drain, config.checkpoint.save_every
    if spilled is None:
        yield (
            "the storage planned does not hold activations, whose bytes can't be told for this "
            "model before it runs; leave room for them in `tiers.storage.capacity`"
        )
    if drain is not None and not saves:
        yield "`checkpoint.drain` has no effect without `checkpoint.save_every`; set it, or neither"
    elif drain is not None and (path := shared_path(Path(drain), directories)) is not None:
        yield (
            f"`checkpoint.drain` = `{drain}` lies on the file system of storage path `{path}`, "
            "with which it would be lost; name a directory on another drive or file system"
        )
    # A run that keeps nothing until its end begins anew for less than a lost path.
    elif drain is None and tier.durability != "none" and (saves or tier.commit_every):
        save_key = "" if saves else "`checkpoint.save_every` and "
        yield (
            "no checkpoint is copied off the storage paths: a path that cannot be read any "
            f"more ends the run for good; set {save_key}`checkpoint.drain`"
        )


def num_kept_checkpoints(config: Config) -> int:
    """Returns how many checkpoints a run keeps at most, as far as its steps say."""
    every, keep_last = config.checkpoint.save_every, config.checkpoint.keep_last
    if not every:
        return 0
    # How many a time interval gives is not known beforehand; one stands for each until then.
    made = config.train.steps // every if isinstance(every, int) else max(keep_last, 1)
    return min(made, keep_last) if keep_last else made


def existing_directories(config: Config, stores: Sequence[Path]) -> list[Path]:
    """Returns the nearest directory above each part of the store that is already there."""
    wanted = list(stores) or [Path(path) for path in config.tiers.storage.paths] or [Path.cwd()]
    return [existing_directory(directory) for directory in wanted]


def _bytes_below(store: Path | None) -> int:
    """Bytes that a store which is gone on with takes already."""
    if store is None or not store.is_dir():
        return 0
    return sum(path.stat().st_blocks * 512 for path in store.rglob("*") if path.is_file())
