"""The session: what a training loop sees of the engine."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

import torch
from torch import nn

from offload.config import Config
from offload.devices import Device
from offload.errors import ConfigError, StoreError
from offload.optim.adagrad import Adagrad
from offload.optim.adam import Adam
from offload.optim.adamw import AdamW
from offload.optim.base import OffloadOptimizer, Parameters, UpdateEngine
from offload.optim.commit_head import CommitHead
from offload.optim.kernels import Kernels, load_kernels
from offload.optim.lion import Lion
from offload.optim.muon import Muon
from offload.optim.record_names import describe_record
from offload.optim.sgd import SGD
from offload.policy import resolve_order
from offload.session.arguments import device_bytes, path_list, require_plain, resolve, size_bytes
from offload.session.options import device_of, warn_of_threads, warn_of_tiers, wrap_options
from offload.session.session_store import SessionStore, choose_roots
from offload.session.stats import SessionStats, count
from offload.storage.manifest_files import require_checkpoint_name
from offload.storage.store import BlockStore
from offload.streaming.buffers import require_storable
from offload.streaming.building import Building, StoreSpill
from offload.streaming.models import MAIN, Models
from offload.streaming.taken import require_free
from offload.streaming.wrapped import WrappedModel

Made = TypeVar("Made", bound=OffloadOptimizer)


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
            "tiers.storage.paths": path_list(paths),
            "policy": policy,
            "offload": offload,
            "optimizer.name": optimizer,
            "optimizer.codec": codec,
            "train.gradient_dtype": gradient_dtype,
            **{f"units.{key}": value for key, value in (units or {}).items()},
        }
        self.config = resolve(config, {k: v for k, v in overrides.items() if v is not None})
        if resume not in (True, False, "auto"):
            raise ConfigError(
                f'cannot make a session: expected `resume` to be True, False or "auto", found '
                f"`{resume!r}`; correct it"
            )
        self._roots = choose_roots(self.config, store)
        self._resume = resume
        self._path_rates = tuple(path_rates)
        self._storage = self._new_storage()
        self._kernels: Kernels | None = None
        self._device: Device | None = None
        self._building: Building | None = None
        self._models = self._new_models()
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
        self._device = device_of(self.config)
        self._device.open()
        self._is_open = True
        if not self._roots:
            return
        try:
            self._open_store()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Detaches from the model and closes the store; what was not committed is lost."""
        models, self._models = self._models.all(), self._new_models()
        storage, self._storage = self._storage, self._new_storage()
        building, self._building = self._building, None
        device, self._device = self._device, None
        self._is_open = False
        with contextlib.ExitStack() as stack:
            if device is not None:
                stack.callback(device.close)
            stack.callback(storage.close)
            if building is not None:
                stack.callback(building.finish)
            stack.callback(storage.close_drain)
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
            budget_bytes = self._models.free_host_bytes
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
            ConfigError: A part is larger than what is left, or a parameter or a buffer cannot be
                kept as it is.
            PlanError: The model does not fit the budget; the message names the smallest.
            StoreError: The session has a model of that name, the models share parameters, or the
                store holds another model.
        """
        self._require_open("wrap a model")
        require_plain(model)
        if self._store is not None and self._store.durability == "commit":
            require_storable(model)
        self._models.require_new(name or MAIN, model)
        require_free(model)
        if name:
            require_checkpoint_name(name)
        assert self._device is not None
        warn_of_tiers(self.config)
        options = dataclasses.replace(
            wrap_options(self.config, training=training, units=units, roots=self._roots),
            name=name,
            **self._models.parts(
                host=size_bytes(host_memory),
                device=device_bytes(device_memory, self._device),
            ),
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
            make_spill=self._storage.make_spill if self._store is not None else None,
        )
        try:
            with torch.inference_mode(mode=False):  # what is made serves training
                wrapped.open()
        except BaseException:
            wrapped.close()
            raise
        self._storage.register(wrapped.transfer_memory)
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
            ConfigError: JSON cannot express the metadata, or would change a key that is no text.
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
        self._storage.save(name)

    def load(self, name: str) -> None:
        """Goes back to checkpoint `name`, in this process; `metadata` is what it was given.

        Gradients and what was not committed are dropped; `param_groups` stay. The next commit makes
        it what a restart finds. After an update that failed in its middle parameters can be used
        again.

        Raises:
            StoreError: There is none of that name, or it is another model's.
            StorageError, CorruptStateError: A transfer failed: parameters cannot be used before
                another `load` succeeds.
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
        self._storage.delete_checkpoint(name)

    def wait_drained(self) -> list[str]:
        """Waits until all checkpoints are copied; returns a line for each that could not be."""
        drain = self._storage.drain
        if drain is None:
            return []
        drain.wait()
        return list(drain.failures)

    def state_digest(self, name: str = MAIN) -> str:
        """Returns one number over parameters and state, equal for equal state however stored.

        Args:
            name: Of the model, where there are several.
        """
        return self._require_wrapped("digest", name).state_digest()

    def stats(self) -> SessionStats:
        """Returns the counters."""
        return count(
            self._models,
            self._store,
            registered_bytes=self._storage.registered_bytes,
            committed_step=self._committed_step,
        )

    @property
    def device(self) -> torch.device:
        """The torch device of the model and its inputs."""
        self._require_open("tell the device")
        assert self._device is not None
        return self._device.torch_device

    @property
    def _store(self) -> BlockStore | None:
        return self._storage.blocks

    @property
    def _wrapped(self) -> WrappedModel | None:
        """The model without a name, or the first."""
        return self._models.main

    def _new_models(self) -> Models:
        tiers = self.config.tiers if self.config.offload else None
        return Models(
            host_bytes=tiers.host.memory if tiers else None,
            device_bytes=tiers.device.memory if tiers else None,
        )

    def _new_storage(self) -> SessionStore:
        return SessionStore(
            self.config, self._roots, path_rates=self._path_rates, describe=self._describe_record
        )

    def _open_store(self) -> None:
        point = self._storage.open(resume=self._resume)
        if point is not None:
            self._resume_point = point
            self.metadata = point.metadata
            self._committed_step = point.step
            self._models.note_resumed(point)
            assert self._device is not None
            warn_of_threads(self._device, committed=point.torch_threads)
        self._storage.start_draining()
        if point is not None:  # `keep_last` may be less than it was
            self._storage.delete_old_checkpoints()

    def _describe_record(self, record: str) -> str:
        """Returns which parameters a stored record holds, for messages."""
        layouts = [model.layout for model in self._models.all()]
        if self._store is not None and self._store.head is not None:
            layouts += CommitHead.from_json(self._store.head).layouts()
        return describe_record(record, layouts)

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
