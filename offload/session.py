"""The session: what a training loop sees of the engine."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

import torch
from torch import nn

from offload.config import Config, build_config, load_config
from offload.devices import Device, make_device
from offload.errors import ConfigError, PlanError, StorageError, StoreError
from offload.optim.adagrad import Adagrad
from offload.optim.adam import Adam
from offload.optim.adamw import AdamW
from offload.optim.base import OffloadOptimizer, Parameters, UpdateEngine
from offload.optim.commit_head import CommitHead
from offload.optim.kernels import Kernels, load_kernels
from offload.optim.lion import Lion
from offload.optim.muon import Muon
from offload.optim.record_names import parameters_by_record
from offload.optim.sgd import SGD
from offload.plan.activations import plan_activations
from offload.policy import resolve_order, resolve_striping
from offload.sizes import parse_duration, parse_size
from offload.storage.drain import Drain, drained_copies
from offload.storage.engine import Engine
from offload.storage.manifest_files import require_checkpoint_name
from offload.storage.measured import measured_settings, nominal_rates
from offload.storage.paced_engine import PacedEngine
from offload.storage.spill import Spill
from offload.storage.stalls import Stall
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath
from offload.storage.store_stats import PathStats
from offload.storage.summary import has_commit
from offload.streaming.activations import ActivationOptions
from offload.streaming.building import Building, StoreSpill
from offload.streaming.counters import MovedBytes
from offload.streaming.models import MAIN, Models
from offload.streaming.swap import Streamed
from offload.streaming.unit_modules import UnitRules
from offload.streaming.wrap_options import WrapOptions
from offload.streaming.wrapped import WrappedModel

_log = logging.getLogger("offload.session")
Made = TypeVar("Made", bound=OffloadOptimizer)

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
    """In calls of `step`."""
    update_wait_s: float = 0.0
    """For which passes waited for updates that run under them."""
    update_io_wait_s: float = 0.0
    """The part of it in which those waited for storage."""
    update_read_bytes: int = 0
    """The part of `read_bytes` that updates read."""
    moved_by_steps: MovedBytes = field(default_factory=MovedBytes)
    """The counters of when no update was pending last: differences are of whole steps."""
    stalls: tuple[Stall, ...] = ()
    """What the caller's thread waited for, longest first."""
    accesses: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int | None = None
    activation_offload_bytes: int = 0
    """Of saved activations that were moved to host memory or storage."""
    activation_kept_bytes: int = 0
    """Of those that should have been, and stayed for lack of room."""
    activation_hits: int = 0
    """Times that a moved one was there when backward asked for it."""
    activation_misses: int = 0
    activation_offload_peak_bytes: int = 0
    """Most bytes of activations away at one time."""
    registered_bytes: int = 0
    """Of slots and windows that the kernel was told of beforehand, so that it does not look their
    pages up at each transfer; 0 where no path uses io_uring or RLIMIT_MEMLOCK does not allow it."""
    completed_steps: int = 0
    committed_step: int | None = None
    paths: tuple[PathStats, ...] = ()
    """Of each path of the store."""


class Session:
    """Trains a model whose state lives in a tiered store.

    Use it as a context manager: `wrap` the model, make the optimizer with `AdamW`, then train in
    an ordinary loop.

    Args:
        config: A `Config`, nested values or a TOML file; what is left out has its default.
        device: `"cpu"`, `"cuda"`, or `"emulated"`: an accelerator's memory and link without one.
        device_memory: Hard budget for parameters on the device. Refused on the unified `cpu`
            device, where `host_memory` is the budget.
        host_memory: Hard budget for parameters, gradients and optimizer state, such as `"24GiB"`.
        paths: Directories on drives: the store has a part on each.
        policy: A preset's name, a file, or choices such as `{"parameters": "host"}`.
        offload: False keeps everything in memory and runs the same arithmetic.
        optimizer: The optimizer for which state is planned, such as `"lion"`. One that needs no
            more may be made instead; `"muon"` has to be named here, since it lays matrices out
            apart.
        codec: `"split"` or `"fp32"`.
        gradient_dtype: `"parameter"` or `"float32"`.
        store: The store's directory, or one on each path; by default one in each of `paths`.
        resume: True goes on from the store's last commit; `"auto"` does so where there is one.
        path_rates: Bytes that go in and out again each second on each path, as measured lately:
            what `proportional` striping goes by, and `adaptive` until it has measured, where the
            machine's profile, `machine.toml`, lacks a path.

        units: Which parameters move together, as under `units` in a config, such as
            `{"classes": ["Block"]}` or `{"largest": "64MiB"}`.

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
        paths: str | Path | Sequence[str | Path] | None = None,
        policy: str | Mapping[str, Any] | None = None,
        offload: bool | None = None,
        optimizer: str | None = None,
        codec: str | None = None,
        gradient_dtype: str | None = None,
        store: str | Path | Sequence[str | Path] | None = None,
        resume: bool | Literal["auto"] = False,
        path_rates: Sequence[float] = (),
        units: Mapping[str, Any] | None = None,
    ) -> None:
        overrides = {
            "tiers.device.kind": device,
            "tiers.device.memory": device_memory,
            "tiers.host.memory": host_memory,
            "tiers.storage.paths": _path_list(paths),
            "policy": policy,
            "offload": offload,
            "optimizer.name": optimizer,
            "optimizer.codec": codec,
            "train.gradient_dtype": gradient_dtype,
            **{f"units.{key}": value for key, value in (units or {}).items()},
        }
        self.config = _resolve(config, {k: v for k, v in overrides.items() if v is not None})
        if resume not in (True, False, "auto"):
            raise ConfigError(
                f'cannot make a session: expected `resume` to be True, False or "auto", found '
                f"`{resume!r}`; correct it"
            )
        self._store_paths = self._choose_store(store)
        self._resume = resume
        self._path_rates = tuple(path_rates)
        self._engines: list[Engine | PacedEngine] = []
        self._store: BlockStore | None = None
        self._drain: Drain | None = None
        self._kernels: Kernels | None = None
        self._device: Device | None = None
        self._building: Building | None = None
        self._models = self._new_models()
        self._resume_point: CommitHead | None = None
        self._committed_step: int | None = None
        self._registered_bytes = 0
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
        self._device = self._make_device()
        self._device.open()
        self._is_open = True
        if not self._store_paths:
            return
        try:
            self._open_store(self._store_paths)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Detaches from the model and closes the store; what was not committed is lost."""
        self._registered_bytes = 0
        models, self._models = self._models.all(), self._new_models()
        store, self._store = self._store, None
        engines, self._engines = self._engines, []
        drain, self._drain = self._drain, None
        building, self._building = self._building, None
        device, self._device = self._device, None
        self._is_open = False
        with contextlib.ExitStack() as stack:
            if device is not None:
                stack.callback(device.close)
            for engine in engines:
                stack.callback(engine.close)
            if store is not None:
                stack.callback(store.close)
            if building is not None:
                stack.callback(building.finish)
            if drain is not None:
                stack.callback(drain.close)
            for wrapped in models:
                stack.callback(wrapped.close)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Builds a model larger than memory: parameters are evicted as the budget fills.

        The values are those of a plain build, whatever the initialisation. Optional.
        """
        self._require_open("build a model")
        if self._building is None:
            spill = StoreSpill(self._store) if self._store is not None else None
            budget_bytes = self._models.free_host_bytes(None)
            self._building = Building(budget_bytes=budget_bytes, spill=spill)
        with self._building.active():
            yield

    def wrap(
        self,
        model: nn.Module,
        training: bool = True,
        *,
        name: str | None = None,
        units: Mapping[str, Any] | None = None,
        host_memory: str | int | None = None,
        device_memory: str | int | None = None,
    ) -> nn.Module:
        """Moves the model's parameters to their tiers, in place, and returns the model.

        A session may have several models, such as one that is trained and a frozen reference.
        They share its store, its commits and its budget.

        Args:
            model: Built on the CPU. Its parameters are those of the store when resuming, if that
                has a model of this name.
            training: False keeps no gradients and no optimizer state.
            name: Of a further model; its records begin with it. Steps and digests are those of the
                model without one. One with a name takes only what it needs and what is fetched
                ahead: wrap such models first, or leave them room by `host_memory`.
            units: Keys of `units` in a config, such as `{"classes": ["Block"]}`, for this model.
            host_memory: The model's part of the budget; by default all that is left.
            device_memory: The same of the device's.

        Raises:
            ConfigError: A part is larger than what is left.
            PlanError: The model does not fit the budget; the message names the smallest.
            StoreError: The session has a model of that name, the models share parameters, or the
                store holds another model.
        """
        self._require_open("wrap a model")
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"cannot wrap `{type(model).__name__}`: expected a torch.nn.Module; pass the model"
            )
        if any(isinstance(module, Streamed) for module in model.modules()):
            raise StoreError(
                "cannot wrap a model that another session has wrapped: expected a plain model; "
                "close that session, or build another model"
            )
        self._models.require_new(name or MAIN, model)
        if name:
            require_checkpoint_name(name)
        assert self._device is not None
        if device_memory is not None and self._device.is_unified:
            raise ConfigError(
                "cannot give a model `device_memory` on a device that computes in host memory: "
                f"expected none, found `{device_memory}`; pass `host_memory`"
            )
        options = dataclasses.replace(
            self._wrap_options(training, units),
            name=name,
            budget_bytes=self._models.free_host_bytes(_size(host_memory)),
            device_budget_bytes=self._models.free_device_bytes(_size(device_memory)),
        )
        assert self._kernels is not None
        point = self._resume_point
        wrapped = WrappedModel(
            model,
            options=options,
            store=self._store,
            kernels=self._kernels,
            order=resolve_order(self.config.policy.order),
            building=self._building,
            resume=None if point is None else point.of(name or MAIN),
            device=self._device,
            host_budget=self._models.host_budget,
            device_budget=self._models.device_budget,
            make_spill=self._make_spill if self._store is not None else None,
        )
        try:
            wrapped.open()
        except BaseException as error:
            wrapped.close()
            if isinstance(error, PlanError) and len(self._models):
                raise PlanError(
                    f"{error}, or give other models less, as `wrap(model, host_memory=...)`"
                ) from error
            raise
        self._register(wrapped.transfer_memory)
        self._models.add(name or MAIN, wrapped)
        if self._building is not None and self._building.is_finished:
            self._building = None
        return model

    def AdamW(self, params: Parameters, **options: Any) -> AdamW:  # noqa: N802 - torch's name
        """Returns the optimizer of the wrapped model.

        Args:
            params: Its parameters, (name, parameter) pairs or param_groups.
            options: `lr`, `betas`, `eps` and `weight_decay` as in `torch.optim.AdamW`.
        """
        return self._optimizer(AdamW, params, options)

    def Adam(self, params: Parameters, **options: Any) -> Adam:  # noqa: N802 - torch's name
        """Returns the optimizer; options are those of `torch.optim.Adam`."""
        return self._optimizer(Adam, params, options)

    def Adagrad(self, params: Parameters, **options: Any) -> Adagrad:  # noqa: N802 - torch's name
        """Returns the optimizer; options are those of `torch.optim.Adagrad`."""
        return self._optimizer(Adagrad, params, options)

    def Lion(self, params: Parameters, **options: Any) -> Lion:  # noqa: N802 - torch's name
        """Returns the optimizer; options are `lr`, `betas` and `weight_decay`."""
        return self._optimizer(Lion, params, options)

    def SGD(self, params: Parameters, **options: Any) -> SGD:  # noqa: N802 - torch's name
        """Returns the optimizer; options are those of `torch.optim.SGD`."""
        return self._optimizer(SGD, params, options)

    def Muon(self, params: Parameters, **options: Any) -> Muon:  # noqa: N802 - torch's name
        """Returns Muon for matrices with AdamW for the rest; see `offload.optim.muon.Muon`."""
        return self._optimizer(Muon, params, options)

    def update_engine(self, params: list[Any]) -> UpdateEngine:
        """Returns what keeps the state of the wrapped model that has the first of `params`.

        For optimizer classes of one's own, derived from `offload.optim.base.OffloadOptimizer`.
        """
        self._require_wrapped("make an optimizer")
        return self._models.engine_of(params)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """A context for all micro-steps of a step but the last, as `no_sync` of DDP.

        With overlap `backward` or `both` updates begin in the last one, as gradients are complete.
        """
        self._require_wrapped("accumulate gradients")
        with contextlib.ExitStack() as stack:
            for model in self._models.all():
                stack.enter_context(model.accumulating())
            yield

    def commit(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Makes the state of now, with `metadata`, what a resume finds.

        Raises:
            StoreError: There is no store, its durability is `none`, or an update failed before.
            StorageError: It could not be written; the last commit is whole.
        """
        self._require_wrapped("commit")
        if self._store is None:
            raise StoreError(
                "cannot commit: expected a store, found none; set `paths` or `store` and leave "
                "`offload` on"
            )
        self._committed_step = self._models.commit(self._store, metadata or {})

    def save(self, name: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Commits, and keeps that commit as checkpoint `name`; copies no block.

        An older checkpoint of that name is replaced. With `checkpoint.keep_last` the oldest ones
        are deleted; with `checkpoint.drain` it is copied there in the background.

        Raises:
            ConfigError: The name has other characters than letters, digits and `._+-`.
            StoreError, StorageError: As from `commit`; older checkpoints are whole.
        """
        require_checkpoint_name(name)
        self.commit(metadata)
        assert self._store is not None
        self._store.save(name)
        if self._drain is not None:
            self._drain.start(name)
        self._delete_old_checkpoints(self._store)

    def load(self, name: str) -> None:
        """Goes back to checkpoint `name`, in this process; `metadata` is what it was given.

        Gradients and what was not committed are dropped. The next commit makes it what a restart
        finds.

        Raises:
            StoreError: There is none of that name, or it is another model's.
        """
        self._require_open("load a checkpoint")
        store = self._store
        if store is None:
            raise StoreError(
                "cannot load a checkpoint: expected a store, found none; set `paths` or `store`"
            )
        head = store.checkpoints().get(name)
        if head is not None:
            self._models.require_in(CommitHead.from_json(head), what=f"checkpoint `{name}`")
            self._models.leave_store()
        point = CommitHead.from_json(store.load(name))
        self.metadata = point.metadata
        self._models.roll_back(point)
        if not len(self._models):
            self._resume_point = point

    def checkpoints(self) -> list[str]:
        """Returns the names of the checkpoints, oldest first."""
        self._require_open("list checkpoints")
        return list(self._store.checkpoints()) if self._store is not None else []

    def delete_checkpoint(self, name: str) -> None:
        """Deletes checkpoint `name`; what only it kept is free space for the next step.

        Raises:
            StoreError: There is none of that name, or its copy to `checkpoint.drain` goes on.
        """
        self._require_open("delete a checkpoint")
        if self._store is None or name not in self._store.checkpoints():
            raise StoreError(
                f"cannot delete checkpoint `{name}`: expected one of {self.checkpoints()}; correct "
                "the name"
            )
        if self._drain is not None and self._drain.is_draining(name):
            raise StoreError(
                f"cannot delete checkpoint `{name}`: expected it to be copied, found that its copy "
                "goes on; call `session.wait_drained()` first"
            )
        self._store.delete_checkpoint(name)

    def wait_drained(self) -> list[str]:
        """Waits until all checkpoints are copied; returns a line for each that could not be."""
        if self._drain is None:
            return []
        self._drain.wait()
        return list(self._drain.failures)

    def state_digest(self, name: str = MAIN) -> str:
        """Returns one number over parameters and state, equal for equal state however stored.

        Args:
            name: Of the model, where there are several.
        """
        return self._require_wrapped("digest", name).state_digest()

    def stats(self) -> SessionStats:
        """Returns the counters."""
        wrapped, store, models = self._wrapped, self._store, self._models
        if wrapped is None:
            return SessionStats(committed_step=self._committed_step)
        io = store.stats() if store is not None else None
        counters = [m.residency.counters for m in models.all() if m.residency is not None]
        accesses = sum(each.accesses for each in counters)
        hits = sum(each.prefetch_hits for each in counters)
        moved = models.without_others(wrapped.counters.moved())
        activations = wrapped.counters.activations
        return SessionStats(
            read_bytes=moved.read_bytes,
            write_bytes=moved.write_bytes,
            commit_bytes=io.commit_bytes + sum(m.counters.commit_record_bytes for m in models.all())
            if io
            else 0,
            cache_hit_bytes=moved.cache_hit_bytes,
            moved_by_steps=models.without_others(wrapped.counters.moved_by_steps()),
            io_wait_s=sum(m.counters.io_wait_s for m in models.all()),
            update_s=wrapped.counters.update_s,
            update_wait_s=wrapped.counters.update_wait_s[0],
            update_io_wait_s=wrapped.counters.update_wait_s[1],
            update_read_bytes=wrapped.counters.update_read_bytes,
            stalls=wrapped.counters.stalls,
            accesses=accesses,
            prefetch_hits=hits,
            prefetch_misses=accesses - hits,
            registered_bytes=self._registered_bytes,
            host_peak_bytes=models.host_budget.peak_bytes,
            device_peak_bytes=None
            if wrapped.device.is_unified
            else models.device_budget.peak_bytes,
            activation_offload_bytes=activations.offload_bytes,
            activation_kept_bytes=activations.kept_bytes,
            activation_hits=activations.hits,
            activation_misses=activations.misses,
            activation_offload_peak_bytes=activations.peak_bytes,
            completed_steps=wrapped.completed_steps,
            committed_step=self._committed_step,
            paths=io.paths if io else (),
        )

    @property
    def device(self) -> torch.device:
        """The torch device of the model and its inputs."""
        self._require_open("tell the device")
        assert self._device is not None
        return self._device.torch_device

    @property
    def _wrapped(self) -> WrappedModel | None:
        """The model without a name, or the first."""
        return self._models.main

    def _new_models(self) -> Models:
        device_bytes = self.config.tiers.device.memory if self.config.offload else None
        return Models(host_bytes=self._budget_bytes, device_bytes=device_bytes)

    @property
    def _budget_bytes(self) -> int | None:
        return self.config.tiers.host.memory if self.config.offload else None

    def _choose_store(self, store: str | Path | Sequence[str | Path] | None) -> list[Path]:
        if not self.config.offload:
            return []
        if store is not None:
            return [Path(store)] if isinstance(store, str | Path) else [Path(s) for s in store]
        paths = self.config.tiers.storage.paths
        for path in paths:
            if not Path(path).is_dir():
                raise ConfigError(
                    f"cannot use path `{path}`: expected a directory, found "
                    f"{'a file' if Path(path).exists() else 'nothing'}; make it, mount it, or "
                    "correct `paths`"
                )
        if paths:
            return [Path(path) / STORE_NAME for path in paths]
        policy = self.config.policy
        if "storage" in (policy.parameters, policy.optimizer, self.config.activations.offload):
            raise ConfigError(
                "cannot keep parameters, optimizer state or activations on storage: expected a "
                "directory in `paths` or `store`, found none; name one, or choose "
                "`policy={'parameters': 'host', 'optimizer': 'host'}`"
            )
        return []

    def _open_store(self, roots: list[Path]) -> None:
        tier = self.config.tiers.storage
        for index, root in enumerate(roots):
            self._engines.append(_open_engine(root, tier.rate_limit_of(index)))
        rates = self._nominal_rates(roots)
        self._store = BlockStore(
            [
                StorePath(
                    root=root,
                    capacity_bytes=tier.capacity_of(index),
                    nominal_bytes_per_s=rate,
                )
                for index, (root, rate) in enumerate(zip(roots, rates, strict=True))
            ],
            engine=self._engines,
            durability=tier.durability,
            describe=self._describe_record,
            striping=resolve_striping(self.config.policy.striping),
            advise=self._advise,
        )
        if self._resume is False or (self._resume == "auto" and not has_commit(*roots)):
            self._store.create()
            self._start_draining(self._store)
            return
        self._store.open()
        self._resume_point = CommitHead.from_json(self._store.head)
        self.metadata = self._resume_point.metadata
        self._committed_step = self._resume_point.step
        self._models.note_resumed(self._resume_point)
        self._start_draining(self._store)
        self._delete_old_checkpoints(self._store)  # `keep_last` may be less than it was

    def _nominal_rates(self, roots: list[Path]) -> tuple[float | None, ...]:
        limits = [self.config.tiers.storage.rate_limit_of(index) for index in range(len(roots))]
        rates = nominal_rates(roots, probed=self._path_rates, limits=limits)
        if None in rates and len(roots) > 1 and self.config.policy.striping == "proportional":
            _log.warning(
                "`policy.striping` = `proportional` goes by the machine's profile, which has no "
                "rate for path `%s`: it counts as the mean of the others; measure it with "
                "`offload bench io PATH --tune`",
                roots[rates.index(None)],
            )
        return rates

    def _register(self, memory: memoryview) -> None:
        """Tells the kernel of memory that every step moves; without that all goes on the same."""
        if memory:
            is_used = [engine.register(memory) for engine in self._engines]
            self._registered_bytes += len(memory) if any(is_used) else 0

    def _start_draining(self, store: BlockStore) -> None:
        options = self.config.checkpoint
        if options.drain is not None:
            self._drain = Drain(
                store,
                target=Path(options.drain),
                bytes_per_s=options.drain_rate_limit,
                keep_last=options.keep_last,
            )
            self._drain.start_unfinished()

    def _delete_old_checkpoints(self, store: BlockStore) -> None:
        keep_last = self.config.checkpoint.keep_last
        names = list(store.checkpoints())
        for name in names[:-keep_last] if keep_last else []:
            # What is still being copied is deleted with a later one.
            if self._drain is None or not self._drain.is_draining(name):
                try:
                    store.delete_checkpoint(name)
                except StorageError as error:  # as where a path is read-only by now
                    _log.warning("%s; it is kept, and so are its blocks", error)

    def _advise(self) -> str:
        """Returns from which copy a run can go on whose paths are lost."""
        target = self.config.checkpoint.drain
        if target is None:
            return "no checkpoint was copied elsewhere: `checkpoint.drain` is not set"
        copies = drained_copies(Path(target))
        if not copies:
            return f"no complete copy of a checkpoint is in `{target}`"
        newest = copies[-1]
        return f"the newest copy of a checkpoint is `{newest.root}`, of step {newest.step}"

    def _describe_record(self, record: str) -> str:
        """Returns which parameters a stored record holds, for messages."""
        layouts = [model.layout for model in self._models.all()]
        if self._store is not None and self._store.head is not None:
            layouts += CommitHead.from_json(self._store.head).layouts()
        for layout in layouts:
            names = parameters_by_record(layout).get(record)
            if names:
                return f"parameters {names}"
        return "no parameter of the model" if layouts else "parameters of an unknown model"

    def _wrap_options(self, training: bool, units: Mapping[str, Any] | None) -> WrapOptions:
        config = self.config
        if units is not None:
            config = _resolve(config, {f"units.{key}": value for key, value in units.items()})
        on_storage = config.offload
        return WrapOptions(
            budget_bytes=self._budget_bytes,
            device_budget_bytes=config.tiers.device.memory,
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
            activations=self._activation_options(),
            units=UnitRules.of(config.units),
            overlap=config.policy.overlap if config.offload else "none",
        )

    def _activation_options(self) -> ActivationOptions:
        asked = self.config.activations
        moves = asked.offload if self.config.offload else "none"
        if moves == "host" and self.config.tiers.device.kind == "cpu":
            _log.warning(
                "`activations.offload` = `host` frees no memory on device `cpu`: activations move "
                "within it; `storage` frees it"
            )
        return ActivationOptions(
            checkpoint=asked.checkpoint,
            offload=moves,
            threshold_bytes=asked.threshold,
            plan=plan_activations(
                moves, memory_bytes=asked.memory, threshold_bytes=asked.threshold
            ),
        )

    def _make_spill(self, place_bytes: int) -> Spill:
        return Spill(self._store_paths, self._engines, place_bytes=place_bytes)

    def _make_device(self) -> Device:
        tier = self.config.tiers.device
        return make_device(
            tier.kind,
            memory_bytes=tier.memory if self.config.offload else None,
            link_bytes_per_s=tier.link_rate,
            link_latency_s=parse_duration(tier.link_latency) if tier.link_latency else 0.0,
        )

    def _require_open(self, action: str) -> None:
        if not self._is_open:
            raise StoreError(
                f"cannot {action}: the session is closed; use it as `with offload.Session(...) "
                "as session:`"
            )

    def _require_wrapped(self, action: str, name: str = MAIN) -> WrappedModel:
        self._require_open(action)
        wrapped = self._models.get(name)
        if wrapped is None:
            which = f"`{name}`" if name else "no model"
            found = f"{which} is not wrapped" if name else "no model is wrapped"
            raise StoreError(f"cannot {action}: {found}; call `session.wrap(model)`")
        return wrapped

    def _optimizer(self, kind: type[Made], params: Parameters, options: dict[str, Any]) -> Made:
        """Makes an optimizer of the model that has the parameters."""
        # A tensor alone is refused by torch.
        listed = [] if isinstance(params, torch.Tensor) else list(params)
        engine = self.update_engine(listed)
        given = params if isinstance(params, torch.Tensor) else cast(Parameters, listed)
        return kind(given, engine=engine, **options)


def _path_list(paths: str | Path | Sequence[str | Path] | None) -> list[str] | None:
    if paths is None:
        return None
    return [str(paths)] if isinstance(paths, (str, Path)) else [str(path) for path in paths]


def _open_engine(root: Path, rate_limit: int | None) -> Engine | PacedEngine:
    plain = Engine(paths=measured_settings(root))
    engine = plain if rate_limit is None else PacedEngine(plain, bytes_per_s=rate_limit)
    engine.open()
    return engine


def _resolve(config: Config | Mapping[str, Any] | str | Path | None, overrides: Any) -> Config:
    if isinstance(config, Config):
        if not overrides:
            return config
        return build_config(config.model_dump(exclude_unset=False), overrides=overrides)
    if isinstance(config, (str, Path)):
        values = load_config(config).model_dump()
        return build_config(values, overrides=overrides)
    return build_config(config, overrides=overrides, source="Session")


def _size(value: str | int | None) -> int | None:
    return parse_size(value) if isinstance(value, str) else value
