"""The store of a session: where it is, its engines, and the copies of its checkpoints."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from offload.config import Config
from offload.errors import ConfigError, StorageError, StoreError
from offload.optim.commit_head import CommitHead
from offload.policy import resolve_striping
from offload.storage.drain import Drain, drained_copies
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings, nominal_rates
from offload.storage.paced_engine import PacedEngine
from offload.storage.spill import Spill
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath
from offload.storage.summary import has_commit

_log = logging.getLogger("offload.session")

STORE_NAME = "offload-store"
"""The store's directory in a path, unless `store` names another."""


def choose_roots(config: Config, store: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """Returns the store's directory on each path; none where all is in memory.

    Raises:
        ConfigError: A path is no directory, or what is on storage has none.
    """
    if not config.offload:
        return []
    if store is not None:
        return [Path(store)] if isinstance(store, str | Path) else [Path(s) for s in store]
    paths = config.tiers.storage.paths
    for path in paths:
        if not Path(path).is_dir():
            raise ConfigError(
                f"cannot use path `{path}`: expected a directory, found "
                f"{'a file' if Path(path).exists() else 'nothing'}; make it, mount it, or "
                "correct `paths`"
            )
    if paths:
        return [Path(path) / STORE_NAME for path in paths]
    policy = config.policy
    if "storage" in (policy.parameters, policy.optimizer, config.activations.offload):
        raise ConfigError(
            "cannot keep parameters, optimizer state or activations on storage: expected a "
            "directory in `paths` or `store`, found none; name one, or choose "
            "`policy={'parameters': 'host', 'optimizer': 'host'}`"
        )
    return []


class SessionStore:
    """Opens and closes the block store of a session with all that it needs.

    Attributes:
        blocks: The store; None where there is none, or it is not open.
        engines: One for each path.
        drain: Copies checkpoints elsewhere; None where that was not asked for.
        registered_bytes: Of memory that the kernel was told of.
    """

    def __init__(
        self,
        config: Config,
        roots: Sequence[Path],
        *,
        path_rates: Sequence[float],
        describe: Callable[[str], str],
    ) -> None:
        """Stores its arguments.

        Args:
            config: Of the session.
            roots: The store's directory on each path.
            path_rates: As measured lately, where the machine's profile lacks a path.
            describe: Gives what a record holds, for messages.
        """
        self.blocks: BlockStore | None = None
        self.engines: list[Engine | PacedEngine] = []
        self.drain: Drain | None = None
        self.registered_bytes = 0
        self._config = config
        self._roots = list(roots)
        self._path_rates = tuple(path_rates)
        self._describe = describe

    def open(self, *, resume: bool | Literal["auto"]) -> CommitHead | None:
        """Makes the store, or opens its last commit and returns what that says; None: it is new.

        Raises:
            StoreError: It holds a commit and `resume` is not set, or it holds none and `resume`
                is True, or another process owns it.
        """
        roots, tier = self._roots, self._config.tiers.storage
        for index, root in enumerate(roots):
            self.engines.append(_open_engine(root, tier.rate_limit_of(index)))
        rates = self._nominal_rates()
        self.blocks = BlockStore(
            [
                StorePath(
                    root=root,
                    capacity_bytes=tier.capacity_of(index),
                    shares_capacity=self._config.activations.offload == "storage",
                    nominal_bytes_per_s=rate,
                    limit_bytes_per_s=tier.rate_limit_of(index),
                )
                for index, (root, rate) in enumerate(zip(roots, rates, strict=True))
            ],
            engine=self.engines,
            durability=tier.durability,
            describe=self._describe,
            striping=resolve_striping(self._config.policy.striping, num_paths=len(roots)),
            advise=self._advise,
        )
        if resume is False or (resume == "auto" and not has_commit(*roots)):
            self.blocks.create()
            return None
        self.blocks.open()
        return CommitHead.from_json(self.blocks.head)

    def close(self) -> None:
        """Closes the store and its engines; `close_drain` comes before."""
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.close)
            if self.blocks is not None:
                stack.callback(self.blocks.close)

    def close_drain(self) -> None:
        """Ends the copies of checkpoints."""
        if self.drain is not None:
            self.drain.close()

    def register(self, memory: memoryview) -> None:
        """Tells the kernel of memory that every step moves; without that all goes on the same."""
        if memory:
            is_used = [engine.register(memory) for engine in self.engines]
            self.registered_bytes += len(memory) if any(is_used) else 0

    def make_spill(self, place_bytes: int) -> Spill:
        """Returns a spill over all paths of the store."""
        assert self.blocks is not None
        rooms = [self.blocks.spill_room(root) for root in self._roots]
        return Spill(self._roots, self.engines, place_bytes=place_bytes, rooms=rooms)

    def start_draining(self) -> None:
        """Goes on with the copies of checkpoints that were not finished, if any are asked for."""
        assert self.blocks is not None
        options = self._config.checkpoint
        if options.drain is not None:
            self.drain = Drain(
                self.blocks,
                target=Path(options.drain),
                bytes_per_s=options.drain_rate_limit,
                keep_last=options.keep_last,
            )
            self.drain.start_unfinished()

    def save(self, name: str) -> None:
        """Names the last commit, starts to copy it where that is asked for, and keeps so many."""
        assert self.blocks is not None
        self.blocks.save(name)
        if self.drain is not None:
            self.drain.start(name)
        self.delete_old_checkpoints()

    def delete_checkpoint(self, name: str) -> None:
        """Deletes checkpoint `name`.

        Raises:
            StoreError: There is none of that name, or its copy goes on.
        """
        names = list(self.blocks.checkpoints()) if self.blocks is not None else []
        if self.blocks is None or name not in names:
            raise StoreError(
                f"cannot delete checkpoint `{name}`: expected one of {names}; correct the name"
            )
        if self.drain is not None and self.drain.is_draining(name):
            raise StoreError(
                f"cannot delete checkpoint `{name}`: expected it to be copied, found that its copy "
                "goes on; call `session.wait_drained()` first"
            )
        self.blocks.delete_checkpoint(name)

    def delete_old_checkpoints(self) -> None:
        """Keeps `checkpoint.keep_last` of them."""
        assert self.blocks is not None
        keep_last = self._config.checkpoint.keep_last
        names = list(self.blocks.checkpoints())
        for name in names[:-keep_last] if keep_last else []:
            # What is still being copied is deleted with a later one.
            if self.drain is None or not self.drain.is_draining(name):
                try:
                    self.blocks.delete_checkpoint(name)
                except StorageError as error:  # as where a path is read-only by now
                    _log.warning("%s; it is kept, and so are its blocks", error)

    def _nominal_rates(self) -> tuple[float | None, ...]:
        roots, tier = self._roots, self._config.tiers.storage
        limits = tier.rate_limits_of(len(roots))
        rates = nominal_rates(roots, probed=self._path_rates, limits=limits)
        if None in rates and len(roots) > 1 and self._config.policy.striping == "proportional":
            _log.warning(
                "`policy.striping` = `proportional` goes by the machine's profile, which has no "
                "rate for path `%s`: it counts as the mean of the others; measure it with "
                "`offload bench io PATH --tune`",
                roots[rates.index(None)],
            )
        return rates

    def _advise(self) -> str:
        """Returns from which copy a run can go on whose paths are lost."""
        target = self._config.checkpoint.drain
        if target is None:
            return "no checkpoint was copied elsewhere: `checkpoint.drain` is not set"
        copies = drained_copies(Path(target))
        if not copies:
            return f"no complete copy of a checkpoint is in `{target}`"
        newest = copies[-1]
        return f"the newest copy of a checkpoint is `{newest.root}`, of step {newest.step}"


def _open_engine(root: Path, rate_limit: int | None) -> Engine | PacedEngine:
    plain = Engine(paths=measured_settings(root))
    engine = plain if rate_limit is None else PacedEngine(plain, bytes_per_s=rate_limit)
    engine.open()
    return engine
