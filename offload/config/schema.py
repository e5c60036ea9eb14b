"""Every key of a run's configuration, with its type, default and meaning."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from offload.config.fields import (
    AbsolutePath,
    Betas,
    Capacities,
    Count,
    CountOrZero,
    DeviceKind,
    Dimension,
    Duration,
    NotNegative,
    OptimizerName,
    OrderName,
    Overlap,
    Paths,
    Patterns,
    RateLimits,
    Repetitions,
    Section,
    Size,
    StepsOrDuration,
    StripingName,
)
from offload.config.presets import resolve_policy
from offload.config.toml import format_toml
from offload.sizes import format_size

AUTO = "auto"


class ModelConfig(Section):
    """Which model is trained: a built-in kind, or a callable of the user's."""

    # Keys that are not fields go to the factory; without one they are refused.
    model_config = ConfigDict(extra="allow")

    kind: Literal["gpt", "factory"] = "gpt"
    """`"gpt"` is the built-in decoder; `"factory"` is implied by `model.factory`."""
    layers: Repetitions = 12
    """Number of decoder blocks."""
    width: Dimension = 768
    """Features per token; a multiple of `heads`."""
    heads: Dimension = 12
    """Attention heads per block."""
    context: Dimension = 256
    """Tokens per sequence; also the length of the data's windows."""
    vocabulary: Dimension = 256
    """Number of token values; text is read as bytes, so at least 256."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Element type of the parameters."""
    factory: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """`"module:callable"`, looked for first in the directory of the run's file. It is called with
    the other keys that are set under `model`, and returns a module with `forward(inputs, targets)`:
    two int64 tensors of shape (`train.batch`, `model.context`), bytes of text and those that follow
    them. It returns the loss, one number with a gradient; validation may pass fewer rows."""

    @model_validator(mode="before")
    @classmethod
    def _imply_kind(cls, values: Any) -> Any:
        if isinstance(values, dict) and "factory" in values and "kind" not in values:
            return {**values, "kind": "factory"}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.factory is not None) != (self.kind == "factory"):
            raise ValueError(
                f"`kind` is `{self.kind}` and `factory` is `{self.factory}`: "
                'with `factory` leave `kind` out, with `kind = "factory"` set `factory`'
            )
        if self.kind == "gpt" and self.width % self.heads:
            raise ValueError(
                f"`width` must be a multiple of `heads`, found {self.width} and {self.heads}"
            )
        if self.kind == "gpt" and self.vocabulary < 256:
            raise ValueError(
                f"`vocabulary` must be 256 or more, as text is read as bytes, "
                f"found {self.vocabulary}"
            )
        return self

    def factory_arguments(self) -> dict[str, Any]:
        """Returns the keywords for the factory: what is set under `model` but itself."""
        return self.model_dump(exclude={"kind", "factory"}, exclude_unset=True)


class DataConfig(Section):
    """Which text the model sees, read as bytes."""

    source: Literal["python-stdlib", "files"] = "python-stdlib"
    """`"python-stdlib"` is the source code of the running Python's standard library; `"files"`
    reads `data.files`."""
    files: Paths = ()
    """Files or globs (`**` for folders of any depth), joined in the order given, each glob
    sorted. Relative ones start at the current directory. Only with `source = "files"`."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The last part of the bytes, kept for validation."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.source == "files") != bool(self.files):
            raise ValueError(
                f'`files` must be set with `source = "files"` and only then, '
                f'found `source = "{self.source}"` and {len(self.files)} files'
            )
        return self


class TrainConfig(Section):
    """How long and in what steps the model is trained."""

    steps: Count = 30
    """Optimizer steps in all, also when resuming."""
    batch: Dimension = 2
    """Sequences per micro-step."""
    micro_steps: Repetitions = 1
    """Forward and backward passes per optimizer step."""
    seed: Annotated[CountOrZero, Field(lt=1 << 63)] = 0
    """Seeds the model's initial values and the choice of batches."""
    max_grad_norm: NotNegative = 0.0
    """Gradients are clipped to this norm; 0 does not clip."""
    eval_every: CountOrZero = 0
    """Steps between validations; 0 validates before the first and after the last step only."""
    gradient_dtype: Literal["parameter", "float32"] = "parameter"
    """Element type in which gradients accumulate: the parameter's own, or fp32 at twice the
    bytes of bf16."""


class OptimizerConfig(Section):
    """The optimizer, by torch's names and defaults."""

    name: OptimizerName = "adamw"
    """The optimizer; `"muon"` updates matrices by Muon and all other parameters by AdamW."""
    lr: NotNegative = 1e-3
    """Learning rate after the warm-up."""
    warmup_steps: CountOrZero = 0
    """At step t, from 1, the learning rate is `lr * min(1, t / warmup_steps)`; 0 has no
    warm-up."""
    betas: Betas = (0.9, 0.999)
    """Decay of the first and the second moment. Not of `sgd` and `adagrad`."""
    eps: NotNegative = 1e-8
    """Added to the square root of the second moment. Not of `lion` and `sgd`."""
    weight_decay: NotNegative = 1e-2
    """Weight decay: multiplied by the learning rate and decoupled for `adamw`, `lion` and `muon`,
    added to the gradient for the others."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Of `sgd` (0 where it is not set) and `muon` (0.95)."""
    nesterov: bool | None = None
    """Of `sgd` with `momentum` (false where it is not set) and `muon` (true)."""
    matrices: Patterns = ("*",)
    """Globs: those matrices within repeated blocks whose names match are updated by Muon. Only
    with `name = "muon"`."""
    codec: Literal["split", "fp32"] = "split"
    """How the state is encoded, both without loss: `split` keeps the low half of the fp32 master
    beside the bf16 parameter (with AdamW 10 bytes per parameter), `fp32` the whole master (12)."""

    @property
    def rule(self) -> str:
        """The update rule of the kernels; with Muon of what is not a matrix."""
        if self.name == "sgd":
            return "momentum" if self.momentum else "sgd"
        return "adamw" if self.name == "muon" else self.name

    @property
    def whole_patterns(self) -> tuple[str, ...]:
        """Globs of the parameters that are updated as whole matrices."""
        return self.matrices if self.name == "muon" else ()


class UnitsConfig(Section):
    """Which parameters move together, where module lists do not tell."""

    modules: Patterns = ()
    """Globs of module names, such as `"encoder.*"`: each module that matches is a unit."""
    classes: Patterns = ()
    """Globs of class names: each module of such a class is a unit."""
    largest: Size | None = None
    """A module with more bytes of parameters is divided into those inside it, if it has any."""
    smallest: Size | None = None
    """A unit with fewer bytes joins a neighbour outside module lists; without it the limit is one
    64th of the largest unit."""


class DeviceTierConfig(Section):
    """Where the model computes."""

    kind: DeviceKind = "cpu"
    """`"cpu"` computes in host memory; there is no second copy. `"cuda"` is the current CUDA
    device. `"emulated"` is a device's memory and its link to the host, computing on the CPU: it
    shows on any machine what a device would do."""
    memory: Size | None = None
    """Budget of the device tier, for parameters; on `cpu` the host's budget holds, so leave it
    out. Without it the tier takes the smallest that works and what is fetched ahead."""
    link_rate: Size | None = None
    """Bytes/s of the emulated device's link, in each direction; without it, no limit. Only with
    `kind = "emulated"`."""
    link_latency: Duration | None = None
    """Time that each copy over the emulated link takes beside that."""


class HostTierConfig(Section):
    """Host RAM."""

    memory: Size | None = None
    """Hard budget for parameters, gradients, optimizer state and the windows in which they move.
    Required unless `offload = false`."""
    window: Size | None = None
    """Part of `memory` for optimizer records that are read, updated and written at one time, at
    most, though always enough for one record. Without it 64 MiB, or what the queues of the paths
    hold, as measured, if that is more."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.memory is not None and self.window is not None and self.window > self.memory:
            raise ValueError(
                f"`window` must be a part of `memory`, which is {format_size(self.memory)}, found "
                f"{format_size(self.window)}"
            )
        return self


class StorageTierConfig(Section):
    """Directories on drives."""

    paths: Paths = ()
    """Directories for the store, one on each path; relative ones start at the current directory.
    Empty: the store is in the run directory."""
    durability: Literal["commit", "none"] = "commit"
    """`"commit"` makes the state survive a crash or power loss as of the last commit; `"none"`
    never commits, and the state ends with the run."""
    commit_every: StepsOrDuration = 0
    """Steps between commits, or a time such as `"10min"`, after which the step in progress is the
    last before a commit; 0 commits at the end of the run only. Only with
    `durability = "commit"`."""
    capacity: Capacities = ()
    """The most bytes that the store may take on a path: one value for each, or one for all.
    `"free"`, or leaving it out: the file system's free space but a margin."""
    rate_limit: RateLimits = ()
    """The most bytes/s, both ways together, that go to and from a path: one value for each, or
    one for all. `"none"`, or leaving it out: no limit. For file systems that others use too."""
    endurance: Size | None = None
    """Bytes that each drive may be written in its life by its data sheet, such as `"600TB"`; the
    plan and the result then say how many days it lasts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.durability == "none" and self.commit_every:
            raise ValueError(
                f'`commit_every` must be 0 with `durability = "none"`, found {self.commit_every}'
            )
        for key in ("capacity", "rate_limit"):
            count = len(getattr(self, key))
            if count > 1 and count != len(self.paths):
                raise ValueError(
                    f"`{key}` must have one value for all paths or one for each of "
                    f"{len(self.paths)}, found {count}"
                )
        return self

    def capacity_of(self, path_index: int) -> int | None:
        """Returns the most bytes on a path; None: its free space but a margin."""
        return _number_at(self.capacity, path_index)

    def rate_limit_of(self, path_index: int) -> int | None:
        """Returns the most bytes/s of a path, None for no limit."""
        return _number_at(self.rate_limit, path_index)

    def rate_limits_of(self, num_paths: int) -> list[int | None]:
        """Returns the most bytes/s of each path, None for no limit."""
        return [self.rate_limit_of(index) for index in range(num_paths)]


def _number_at(values: tuple[int | str, ...], index: int) -> int | None:
    if not values:
        return None
    value = values[index] if len(values) > 1 else values[0]
    return value if isinstance(value, int) else None


class TiersConfig(Section):
    """The levels of memory and what each may hold."""

    device: DeviceTierConfig = DeviceTierConfig()
    """Where the model computes."""
    host: HostTierConfig = HostTierConfig()
    """Host RAM."""
    storage: StorageTierConfig = StorageTierConfig()
    """Directories on drives."""


class PolicyConfig(Section):
    """What is kept where and moved when. A preset gives what a run does not set.

    `"auto"` for any key but `striping` begins with the default preset's value, and `offload train`
    takes another where its plan finds a step faster by more than the plan's error. No value of
    these keys changes a result. `policy = "auto"` is all of them.
    """

    AUTO_KEYS: ClassVar = ("parameters", "optimizer", "order", "overlap", "prefetch")

    parameters: Literal["device", "host", "storage"]
    """The tier in which parameters live between uses. `"device"` keeps all of them in the device's
    memory, where passes use them at once, and in host memory, where updates change them; on device
    `cpu`, whose memory is the host's, it is `"host"`."""
    optimizer: Literal["host", "storage"]
    """The tier in which optimizer state lives between updates."""
    order: OrderName
    """Which subgroup is updated next."""
    overlap: Overlap
    """What updates run under: `"forward"`, the default with order `"resident"`, under the next
    forward pass; `"backward"` as soon as gradients are complete, without clipping by a global norm;
    `"both"`; `"none"`, the default with the other orders, after the backward pass."""
    striping: StripingName
    """How blocks are spread over paths: `"adaptive"` by what each delivers lately,
    `"proportional"` by the machine's profile, `"modulo"` record by record in turns, with a ratio
    as `"modulo:2:1"`, `"single"` on the first path that has room."""
    prefetch: CountOrZero
    """Prefetch distance in units: how far ahead of use parameters are fetched, at least. Each needs
    a slot beside the one in use. Where fetches come late and there are more slots, it grows by the
    rates at which units are fetched and used; 0 fetches on demand."""
    _auto: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def auto(self) -> frozenset[str]:
        """The keys that are `"auto"`: the values here are those they begin with."""
        return self._auto

    def with_values(self, **changes: Any) -> "PolicyConfig":
        """Returns this policy with other values, and nothing left `"auto"`."""
        return PolicyConfig(
            **{key: getattr(self, key) for key in type(self).model_fields} | changes
        )

    @model_validator(mode="wrap")
    @classmethod
    def _begin_auto(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, Mapping):
            return handler(values)
        auto = frozenset(key for key in cls.AUTO_KEYS if values.get(key) == AUTO)
        if not auto:
            return handler(values)
        if "order" in auto and "overlap" not in values:
            auto |= {"overlap"}  # an order implies it
        begun = {key: value for key, value in values.items() if key not in auto}
        begun |= {key: v for key, v in resolve_policy(None).items() if key in auto}
        policy = handler(begun)
        policy._auto = auto
        return policy

    @model_serializer(mode="wrap")
    def _show_auto(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: AUTO if key in self._auto else value for key, value in handler(self).items()}

    @model_validator(mode="before")
    @classmethod
    def _imply_overlap(cls, values: Any) -> Any:
        if isinstance(values, dict) and "overlap" not in values:
            # Under a pass the order is the pass's own: one that was asked for has its update alone.
            return {**values, "overlap": "forward" if values.get("order") == "resident" else "none"}
        return values


class ActivationsConfig(Section):
    """What becomes of activations between forward and backward; none of it changes a bit."""

    checkpoint: Literal["none", "unit"] = "none"
    """`"unit"` keeps only the inputs of each element of a module list and computes the rest again
    in backward. Leave it out where the model has activation checkpoints of its own."""
    offload: Literal["none", "host", "storage"] = "none"
    """Where saved activations go until backward needs them. `"host"` frees a device's memory, not
    the `cpu`'s; `"storage"` frees both. Without effect with `offload = false`."""
    threshold: Size = 256 << 10
    """Activations of fewer bytes stay where they are. Only with `offload`, as is `memory`."""
    memory: Size = 64 << 20
    """Part of `tiers.host.memory` where they lie, or through which they go to storage. What finds
    no room on the host stays on the device."""


class CheckpointConfig(Section):
    """Named commits kept beside the newest."""

    save_every: StepsOrDuration = 0
    """Steps between checkpoints, or a time such as `"2h"`; 0 saves none."""
    keep_last: CountOrZero = 0
    """How many checkpoints are kept; 0 keeps all."""
    drain: AbsolutePath | None = None
    """A directory, best on another file system, to which checkpoints are copied in the
    background."""
    drain_rate_limit: Size | None = None
    """The most bytes/s that are copied there. Only with `drain`."""
    mean_time_between_failures: Duration = "24h"
    """How often the machine is expected to fail; what the interval between commits that loses
    least work is computed from."""


class Config(Section):
    """The configuration of a run: one TOML file, with every size in bytes."""

    offload: bool = True
    """`false` keeps everything in memory and runs the same arithmetic, for comparison; tiers and
    policy then have no effect."""
    model: ModelConfig = ModelConfig()
    """Which model is trained."""
    data: DataConfig = DataConfig()
    """Which text it sees."""
    train: TrainConfig = TrainConfig()
    """How long and in what steps it is trained."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How it is updated."""
    units: UnitsConfig = UnitsConfig()
    """Which parameters move together."""
    tiers: TiersConfig = TiersConfig()
    """The levels of memory."""
    policy: PolicyConfig
    """What is kept where and moved when: in a file also the name of a preset, or a file."""
    activations: ActivationsConfig = ActivationsConfig()
    """What becomes of activations between forward and backward."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Named commits kept beside the newest."""

    @property
    def parameter_tier(self) -> Literal["device", "host", "storage"]:
        """The tier in which parameters live on this device, with offloading or without."""
        if not self.offload or self.policy.parameters == "device":
            return "host" if self.tiers.device.kind == "cpu" else "device"
        return self.policy.parameters

    @property
    def optimizer_tier(self) -> Literal["host", "storage"]:
        """The tier in which optimizer state lives, with offloading or without."""
        return self.policy.optimizer if self.offload else "host"

    @property
    def shares_cores(self) -> bool:
        """Whether passes compute on the cores on which updates do."""
        return self.tiers.device.kind != "cuda"

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Returns the JSON schema of a file, for editors."""
        schema = cls.model_json_schema(mode="validation")
        # In a file a preset fills in what the table leaves out.
        schema["$defs"]["PolicyConfig"].pop("required")
        keys = schema["$defs"]["PolicyConfig"]["properties"]
        for key in PolicyConfig.AUTO_KEYS:
            described = {k: keys[key].pop(k) for k in ("title", "description") if k in keys[key]}
            keys[key] = {"anyOf": [keys[key], {"const": AUTO}], **described}
        policy = schema["properties"]["policy"]
        schema["properties"]["policy"] = {
            "anyOf": [{"$ref": policy.pop("$ref")}, {"type": "string"}],
            **policy,
        }
        schema.pop("required")
        return schema

    def settled(self) -> "Config":
        """Returns this run with each `"auto"` of its policy at the value it begins with."""
        return self.model_copy(update={"policy": self.policy.with_values()})

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, without what is unset, that build this very config again."""
        values = self.model_dump(mode="json", exclude_none=True)
        if self.model.factory is not None:
            values["model"] = self.model.model_dump(mode="json", exclude_unset=True)
        return values

    def to_toml(self) -> str:
        """Returns this config as a TOML file that loads as the same config."""
        return format_toml(self.to_dict())
