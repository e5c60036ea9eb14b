"""The session: what a training loop sees of the engine."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import nn

from offload.config import Config, build_config, load_config
from offload.errors import ConfigError, StoreError
from offload.optim.adagrad import Adagrad
from offload.optim.adam import Adam
from offload.optim.adamw import AdamW
from offload.optim.base import Parameters
from offload.optim.commit_head import CommitHead
from offload.optim.kernels import Kernels, load_kernels
from offload.optim.lion import Lion
from offload.optim.muon import Muon
from offload.optim.record_names import parameters_by_record
from offload.optim.sgd import SGD
from offload.policy import resolve_order
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings
from offload.storage.store import BlockStore
from offload.storage.summary import has_commit
from offload.streaming.building import Building, StoreSpill
from offload.streaming.wrapped import WrapOptions, WrappedModel

STORE_NAME = "offload-store"
"""The store's directory in a path, unless `store` names another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """Counters since the session was opened."""

    read_bytes: int = 0
    """Of records, from storage, padding included; without those that digests read."""
    write_bytes: int = 0
    """Of records, to storage, padding included; without those that commits wrote."""
    commit_bytes: int = 0
    """Manifests, and records that were written because of a commit."""
    cache_hit_bytes: int = 0
    io_wait_s: float = 0.0
    update_s: float = 0.0
    accesses: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int | None = None
    completed_steps: int = 0
    committed_step: int | None = None


class Session:
    """Trains one model whose state lives in a tiered store.

    Use it as a context manager: `wrap` the model, make the optimizer with `AdamW`, then train in
    an ordinary loop.

    Args:
        config: A `Config`, nested values or a TOML file; what is left out has its default.
        device: Only `"cpu"` in this version.
        device_memory: Refused on the unified `cpu` device, where `host_memory` is the budget.
        host_memory: Hard budget for parameters, gradients and optimizer state, such as `"24GiB"`.
        paths: Directories on drives; one in this version.
        policy: A preset's name, a file, or choices such as `{"parameters": "host"}`.
        offload: False keeps everything in memory and runs the same arithmetic.
        optimizer: The optimizer for which state is planned, such as `"lion"`. One that needs no
            more may be made instead; `"muon"` has to be named here, since it lays matrices out
            apart.
        codec: `"split"` or `"fp32"`.
        gradient_dtype: `"parameter"` or `"float32"`.
        store: The store's directory; by default one in the first path.
        resume: True goes on from the store's last commit; `"auto"` does so where there is one.

    Raises:
        ConfigError: A value is wrong.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        device: str | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        paths: list[str] | list[Path] | None = None,
        policy: str | Mapping[str, Any] | None = None,
        offload: bool | None = None,
        optimizer: str | None = None,
        codec: str | None = None,
        gradient_dtype: str | None = None,
        store: str | Path | None = None,
        resume: bool | Literal["auto"] = False,
    ) -> None:
        overrides = {
            "tiers.device.kind": device,
            "tiers.device.memory": device_memory,
            "tiers.host.memory": host_memory,
            "tiers.storage.paths": None if paths is None else [str(p) for p in paths],
            "policy": policy,
            "offload": offload,
            "optimizer.name": optimizer,
            "optimizer.codec": codec,
            "train.gradient_dtype": gradient_dtype,
        }
        self.config = _resolve(config, {k: v for k, v in overrides.items() if v is not None})
        self._store_path = self._choose_store(store)
        self._resume = resume
        self._engine: Engine | None = None
        self._store: BlockStore | None = None
        self._kernels: Kernels | None = None
        self._building: Building | None = None
        self._wrapped: WrappedModel | None = None
        self._resume_point: CommitHead | None = None
        self._committed_step: int | None = None
        self._is_open = False
        self.metadata: dict[str, Any] | None = None
        """What the commit that was resumed was given; None for a new store."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Opens the store, if there is one, and loads the kernels.

        Raises:
            StoreError: The store holds a commit and `resume` is not set, or it holds none and
                `resume` is True, or another process owns it.
        """
        if self._is_open:
            return
        self._kernels = load_kernels()
        self._is_open = True
        if self._store_path is None:
            return
        try:
            self._open_store(self._store_path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Detaches from the model and closes the store; what was not committed is lost."""
        wrapped, self._wrapped = self._wrapped, None
        store, self._store = self._store, None
        engine, self._engine = self._engine, None
        building, self._building = self._building, None
        self._is_open = False
        with contextlib.ExitStack() as stack:
            if engine is not None:
                stack.callback(engine.close)
            if store is not None:
                stack.callback(store.close)
            if building is not None:
                stack.callback(building.finish)
            if wrapped is not None:
                stack.callback(wrapped.close)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Builds a model larger than memory: parameters are evicted as the budget fills.

        The values are those of a plain build, whatever the initialisation. Optional.
        """
        self._require_open("build a model")
        if self._wrapped is not None:
            raise StoreError(
                "cannot build a model after `wrap`: expected `building()` before it; build first, "
                "or open another session"
            )
        if self._building is None:
            spill = StoreSpill(self._store) if self._store is not None else None
            self._building = Building(budget_bytes=self._budget_bytes, spill=spill)
        with self._building.active():
            yield

    def wrap(self, model: nn.Module, training: bool = True) -> nn.Module:
        """Moves the model's parameters to their tiers, in place, and returns the model.

        Args:
            model: Built on the CPU. Its parameters are those of the store when resuming.
            training: False keeps no gradients and no optimizer state.

        Raises:
            PlanError: The model does not fit the budget; the message names the smallest.
            StoreError: The session has a model already, or the store holds another.
        """
        self._require_open("wrap a model")
        if self._wrapped is not None:
            raise StoreError(
                "cannot wrap a second model: a session has one in this version; open another "
                "session with a store of its own"
            )
        assert self._kernels is not None
        wrapped = WrappedModel(
            model,
            options=self._wrap_options(training),
            store=self._store,
            kernels=self._kernels,
            order=resolve_order(self.config.policy.order),
            building=self._building,
            resume=self._resume_point,
        )
        try:
            wrapped.open()
        except BaseException:
            wrapped.close()
            raise
        self._wrapped = wrapped
        return model

    def AdamW(self, params: Parameters, **options: Any) -> AdamW:  # noqa: N802 - torch's name
        """Returns the optimizer of the wrapped model.

        Args:
            params: Its parameters, (name, parameter) pairs or param_groups.
            options: `lr`, `betas`, `eps` and `weight_decay` as in `torch.optim.AdamW`.
        """
        return AdamW(params, engine=self._require_wrapped("make an optimizer"), **options)

    def Adam(self, params: Parameters, **options: Any) -> Adam:  # noqa: N802 - torch's name
        """Returns the optimizer; options are those of `torch.optim.Adam`."""
        return Adam(params, engine=self._require_wrapped("make an optimizer"), **options)

    def Adagrad(self, params: Parameters, **options: Any) -> Adagrad:  # noqa: N802 - torch's name
        """Returns the optimizer; options are those of `torch.optim.Adagrad`."""
        return Adagrad(params, engine=self._require_wrapped("make an optimizer"), **options)

    def Lion(self, params: Parameters, **options: Any) -> Lion:  # noqa: N802 - torch's name
        """Returns the optimizer; options are `lr`, `betas` and `weight_decay`."""
        return Lion(params, engine=self._require_wrapped("make an optimizer"), **options)

    def SGD(self, params: Parameters, **options: Any) -> SGD:  # noqa: N802 - torch's name
        """Returns the optimizer; options are those of `torch.optim.SGD`."""
        return SGD(params, engine=self._require_wrapped("make an optimizer"), **options)

    def Muon(self, params: Parameters, **options: Any) -> Muon:  # noqa: N802 - torch's name
        """Returns Muon for matrices with AdamW for the rest; see `offload.optim.muon.Muon`."""
        return Muon(params, engine=self._require_wrapped("make an optimizer"), **options)

    def commit(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Makes the state of now, with `metadata`, what a resume finds.

        Raises:
            StoreError: There is no store, its durability is `none`, or an update failed before.
            StorageError: It could not be written; the last commit is whole.
        """
        wrapped = self._require_wrapped("commit")
        if self._store is None:
            raise StoreError(
                "cannot commit: expected a store, found none; set `paths` or `store` and leave "
                "`offload` on"
            )
        wrapped.commit(metadata or {})
        self._committed_step = wrapped.completed_steps

    def state_digest(self) -> str:
        """Returns one number over parameters and state, equal for equal state however stored."""
        return self._require_wrapped("digest").state_digest()

    def stats(self) -> SessionStats:
        """Returns the counters."""
        wrapped, store = self._wrapped, self._store
        if wrapped is None:
            return SessionStats(committed_step=self._committed_step)
        io = store.stats() if store is not None else None
        counters = wrapped.residency.counters if wrapped.residency is not None else None
        accesses = counters.accesses if counters else 0
        hits = counters.prefetch_hits if counters else 0
        by_commits = wrapped.commit_record_bytes
        return SessionStats(
            read_bytes=io.read_bytes - wrapped.digest_read_bytes if io else 0,
            write_bytes=io.write_bytes - by_commits if io else 0,
            commit_bytes=io.commit_bytes + by_commits if io else 0,
            cache_hit_bytes=wrapped.cache_hit_bytes,
            io_wait_s=wrapped.io_wait_s,
            update_s=wrapped.update_s,
            accesses=accesses,
            prefetch_hits=hits,
            prefetch_misses=accesses - hits,
            host_peak_bytes=wrapped.host_peak_bytes,
            completed_steps=wrapped.completed_steps,
            committed_step=self._committed_step,
        )

    @property
    def _budget_bytes(self) -> int | None:
        return self.config.tiers.host.memory if self.config.offload else None

    def _choose_store(self, store: str | Path | None) -> Path | None:
        if not self.config.offload:
            return None
        paths = self.config.tiers.storage.paths
        if store is not None:
            return Path(store)
        if paths:
            return Path(paths[0]) / STORE_NAME
        policy = self.config.policy
        if "storage" in (policy.parameters, policy.optimizer):
            raise ConfigError(
                "cannot keep parameters or optimizer state on storage: expected a directory in "
                "`paths` or `store`, found none; name one, or choose `policy={'parameters': "
                "'host', 'optimizer': 'host'}`"
            )
        return None

    def _open_store(self, path: Path) -> None:
        tier = self.config.tiers.storage
        self._engine = Engine(paths=measured_settings(path))
        self._engine.open()
        self._store = BlockStore(
            path,
            engine=self._engine,
            capacity_bytes=tier.capacity,
            durability=tier.durability,
            describe=self._describe_record,
        )
        if self._resume is False or (self._resume == "auto" and not has_commit(path)):
            self._store.create()
            return
        self._store.open()
        self._resume_point = CommitHead.from_json(self._store.head)
        self.metadata = self._resume_point.metadata
        self._committed_step = self._resume_point.step

    def _describe_record(self, record: str) -> str:
        """Returns which parameters a stored record holds, for messages."""
        if self._wrapped is not None:
            layout = self._wrapped.layout
        elif self._store is not None and self._store.head is not None:
            layout = CommitHead.from_json(self._store.head).layout
        else:
            return "parameters of an unknown model"
        names = parameters_by_record(layout).get(record)
        return f"parameters {names}" if names else "no parameter of the model"

    def _wrap_options(self, training: bool) -> WrapOptions:
        config = self.config
        on_storage = config.offload
        return WrapOptions(
            budget_bytes=self._budget_bytes,
            parameters="storage"
            if on_storage and config.policy.parameters == "storage"
            else "host",
            optimizer="storage" if on_storage and config.policy.optimizer == "storage" else "host",
            codec=config.optimizer.codec,
            rule=config.optimizer.rule,
            matrices=config.optimizer.whole_patterns,
            gradient_dtype=config.train.gradient_dtype,
            prefetch_distance=config.policy.prefetch,
            is_training=training,
        )

    def _require_open(self, action: str) -> None:
        if not self._is_open:
            raise StoreError(
                f"cannot {action}: the session is closed; use it as `with offload.Session(...) "
                "as session:`"
            )

    def _require_wrapped(self, action: str) -> WrappedModel:
        self._require_open(action)
        if self._wrapped is None:
            raise StoreError(f"cannot {action}: no model is wrapped; call `session.wrap(model)`")
        return self._wrapped


def _resolve(config: Config | Mapping[str, Any] | str | Path | None, overrides: Any) -> Config:
    if isinstance(config, Config):
        if not overrides:
            return config
        return build_config(config.model_dump(exclude_unset=False), overrides=overrides)
    if isinstance(config, (str, Path)):
        values = load_config(config).model_dump()
        return build_config(values, overrides=overrides)
    return build_config(config, overrides=overrides, source="Session")
