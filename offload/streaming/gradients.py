"""Gradients: taken as they appear, kept in the host arena or spilled, shown as `p.grad`."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from offload.devices import Copy, CpuDevice, Device
from offload.errors import ConfigError, StoreError
from offload.layout import FlatShard, ModelLayout, PlacedParameter
from offload.memory import storage_over
from offload.optim.gradient import Accumulator, StreamedGradient, SumsOfSquares
from offload.optim.gradient_home import GradientHome, ResidentGradient
from offload.optim.kernels import Kernels
from offload.plan.gradients import GradientPlan, gradient_bytes, gradient_dtype_of
from offload.storage.spill import Spill
from offload.streaming.host_memory import HostMemory
from offload.streaming.link_waits import LinkWaits
from offload.streaming.spilled_gradients import SpilledGradients


def open_gradients(
    layout: ModelLayout,
    parameters: Mapping[str, nn.Parameter],
    *,
    plan: GradientPlan,
    memory: HostMemory,
    device: Device,
    link_waits: LinkWaits,
    kernels: Kernels,
    make_spill: Callable[[int], Spill] | None,
    before_write: Callable[[str], None],
    on_arrival: Callable[[str], None] | None,
) -> "Gradients":
    """Makes the accumulators of a model; see `Gradients`.

    Args:
        layout: Of the model.
        parameters: By name.
        plan: Which gradients stay in memory.
        memory: As planned.
        device: Where gradients appear.
        link_waits: Counts waits for their copies from there.
        kernels: For norms.
        make_spill: Gives spill files for pieces of so many bytes; needed where any are spilled.
        before_write: Called with a parameter's name before its gradient changes.
        on_arrival: Called with a parameter's name when autograd has accumulated its gradient; None:
            nobody waits for it.

    Raises:
        StorageError: The spill files can't be made.
    """

    def sums_of_squares(gradients: Sequence[torch.Tensor], scales: Sequence[float]) -> list[float]:
        return kernels.sums_of_squares(gradients, scales=scales)

    def is_shown(shard: FlatShard) -> bool:
        names = (placed.facts.name for placed in shard.parameters)
        return any(isinstance(parameters[name].grad, StreamedGradient) for name in names)

    spilled = None
    if memory.gradient_slots is not None:
        assert make_spill is not None, "gradients are spilled only where there is a store"
        spill = make_spill(plan.place_bytes)
        spill.open()
        spilled = SpilledGradients(
            layout,
            plan,
            slots=memory.gradient_slots,
            spill=spill,
            stalls=link_waits.stalls,
            sums_of_squares=sums_of_squares,
            is_live=is_shown,
        )
    return Gradients(
        layout,
        parameters,
        region=memory.gradients,
        dtype=plan.dtype,
        device=device,
        link_waits=link_waits,
        sums_of_squares=sums_of_squares,
        before_write=before_write,
        on_arrival=on_arrival,
        spilled=spilled,
    )


class Gradients:
    """The accumulators of a model's trainable parameters.

    The first gradient of a step is copied; autograd adds later ones into the accumulator itself,
    since `p.grad` is then a streamed gradient.

    Attributes:
        flat: The accumulators of each trainable flat shard that stays in memory, 1-D, in the
            layout of the shard.
        spilled: The gradients of the others; None where all stay.
    """

    def __init__(
        self,
        layout: ModelLayout,
        parameters: Mapping[str, nn.Parameter],
        *,
        region: memoryview,
        dtype: str,
        sums_of_squares: SumsOfSquares,
        before_write: Callable[[str], None],
        on_arrival: Callable[[str], None] | None = None,
        device: Device | None = None,
        link_waits: LinkWaits,
        spilled: SpilledGradients | None = None,
    ) -> None:
        """Makes the accumulators and follows the parameters.

        Args:
            layout: Of the model.
            parameters: By name.
            region: For the gradients that stay in memory.
            dtype: `"parameter"` or `"float32"`.
            sums_of_squares: For norms.
            before_write: Called with a parameter's name before its gradient changes.
            on_arrival: Called with a parameter's name when autograd has accumulated its gradient.
            device: Where gradients appear.
            link_waits: Counts waits for their copies from there.
            spilled: The gradients that do not stay in memory.
        """
        self.flat: dict[str, torch.Tensor] = {}
        self._parameters = parameters
        self._on_arrival = on_arrival
        self._accumulators: dict[int, Accumulator] = {}  # by the parameter's identity
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._dtypes_before: dict[str, torch.dtype | None] = {}  # `grad_dtype` of others, by name
        self._device = CpuDevice() if device is None else device
        self._link_waits = link_waits
        self._max_in_flight_bytes = max((unit.num_bytes for unit in layout.units), default=0)
        self._in_flight: deque[tuple[Copy, int]] = deque()
        self._in_flight_bytes = 0
        self.spilled = spilled
        offset = 0
        for shard in layout.shards.values():
            if not shard.is_trainable:
                continue
            if self.spilled is None or shard.name not in self.spilled:
                stop = offset + gradient_bytes(shard, dtype)
                self.flat[shard.name] = _flat(shard, region[offset:stop], dtype)
                offset = stop
            for placed in shard.parameters:
                accumulator = Accumulator(
                    placed.facts.name,
                    self._home(shard, placed),
                    sums_of_squares,
                    before_write,
                    device=self._device.torch_device,
                )
                if self.spilled is not None and shard.name in self.spilled:
                    self.spilled.on_leaving(shard.name, accumulator.settle)
                self._accumulators[id(parameters[placed.facts.name])] = accumulator
        trained = [each for each in parameters.values() if id(each) in self._accumulators]
        for parameter in trained:
            _require_dtype(parameter, self._accumulators[id(parameter)])
        for parameter in trained:
            self._prepare(parameter, self._accumulators[id(parameter)])

    def take_existing(self) -> None:
        """Takes the gradients from before `wrap`; parameters are where they will be shown."""
        for parameter in self._parameters.values():
            accumulator, gradient = self._accumulators.get(id(parameter)), parameter.grad
            if accumulator is None or gradient is None:
                continue
            if isinstance(gradient, StreamedGradient):  # of a session that is closed
                gradient = gradient.accumulator.read()
            parameter.grad = None
            self._take(parameter, accumulator, gradient.detach())

    def accumulator_of(self, parameter: nn.Parameter) -> Accumulator | None:
        """Returns the gradient that the next update takes, or None if there is none.

        A gradient that the user assigned is taken into the accumulator first.
        """
        gradient = parameter.grad
        if gradient is None:
            return None
        accumulator = self._accumulators.get(id(parameter))
        if accumulator is None:
            name = next((n for n, p in self._parameters.items() if p is parameter), "?")
            raise ConfigError(
                f"cannot update parameter `{name}`: expected one that was trainable when the model "
                "was wrapped, found one that was frozen then and has a gradient now; set "
                "`requires_grad` before `wrap`"
            )
        if not isinstance(gradient, StreamedGradient):
            self._take(parameter, accumulator, gradient.detach())
        elif gradient.accumulator is not accumulator:
            accumulator.start(gradient.accumulator.read())
            parameter.grad = StreamedGradient(accumulator)
        return accumulator

    def begin_rows(self, parameter: nn.Parameter) -> "RowGradient":
        """Returns where a backward writes the gradient of a wide parameter, by rows."""
        before = self.accumulator_of(parameter)  # takes in what the user assigned
        if before is not None:
            return RowGradient(before, before.writable(), parameter, is_first=False)
        accumulator = self._accumulators[id(parameter)]
        return RowGradient(accumulator, accumulator.begin(), parameter, is_first=True)

    def aliased(self, names: Iterable[str]) -> list[str]:
        """Returns those whose gradients somebody may write to at any time."""
        found = ((name, self._accumulators.get(id(self._parameters[name]))) for name in names)
        return [name for name, each in found if each is not None and each.is_aliased]

    def settle(self) -> None:
        """Waits until every gradient has arrived in its accumulator.

        Raises:
            StorageError: One could not be spilled.
        """
        while self._in_flight:
            self._end_oldest()
        if self.spilled is not None:
            self.spilled.flush()

    def close(self) -> None:
        """Removes the hooks; gradients that are shown stay readable."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name, dtype in self._dtypes_before.items():
            parameter = self._parameters[name]
            # None: whatever comes once what is shown now, which is of another, is gone.
            parameter.grad_dtype = dtype if parameter.grad is None else None
        self._dtypes_before.clear()
        while self._in_flight:
            self._end_oldest()
        if self.spilled is not None:
            self.spilled.close()

    def _home(self, shard: FlatShard, placed: PlacedParameter) -> GradientHome:
        if self.spilled is not None and shard.name in self.spilled:
            return self.spilled.home(placed, shard.name)
        memory = self.flat[shard.name][placed.start : placed.stop]
        return ResidentGradient(memory.view(placed.facts.shape))

    def _prepare(self, parameter: nn.Parameter, accumulator: Accumulator) -> None:
        dtype = accumulator.dtype
        if dtype != parameter.dtype and parameter.grad_dtype != dtype:
            before, parameter.grad = parameter.grad, None  # torch changes the dtype of none
            self._dtypes_before[accumulator.name] = parameter.grad_dtype
            parameter.grad_dtype = dtype
            if before is not None:
                parameter.grad = before.detach().to(dtype)
        handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            functools.partial(self._on_accumulated, accumulator)
        )
        self._handles.append(handle)

    def _on_accumulated(self, accumulator: Accumulator, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        # None: a custom function returned none. A `grad_fn`: `create_graph`, torch still needs it.
        if gradient is None or gradient.grad_fn:
            return
        if not isinstance(gradient, StreamedGradient):
            self._take(parameter, accumulator, gradient)
        if self._on_arrival is not None:
            self._on_arrival(accumulator.name)

    def _take(
        self, parameter: nn.Parameter, accumulator: Accumulator, gradient: torch.Tensor
    ) -> None:
        if gradient.shape != accumulator.shape:
            raise StoreError(
                f"cannot take the gradient of `{accumulator.name}`: expected shape "
                f"{tuple(accumulator.shape)}, found {tuple(gradient.shape)}"
            )
        comes_down = not self._device.is_unified and gradient.device == accumulator.device
        accumulator.start(gradient, start_copy=self._start_copy if comes_down else None)
        parameter.grad = StreamedGradient(accumulator)

    def _start_copy(self, gradient: torch.Tensor, into: torch.Tensor) -> Copy:
        """Starts copying a gradient from the device, at most one unit's bytes ahead."""
        num_bytes = into.numel() * into.element_size()
        while self._in_flight and self._in_flight_bytes + num_bytes > self._max_in_flight_bytes:
            self._end_oldest()
        copy = self._device.copy_out(gradient, into)
        self._in_flight.append((copy, num_bytes))
        self._in_flight_bytes += num_bytes
        return copy

    def _end_oldest(self) -> None:
        copy, num_bytes = self._in_flight[0]  # an interrupt of the wait leaves it there
        with self._link_waits.waiting("copying gradients"):
            copy.synchronize()
        self._in_flight.popleft()
        self._in_flight_bytes -= num_bytes


def _require_dtype(parameter: nn.Parameter, accumulator: Accumulator) -> None:
    """Raises ConfigError where torch makes no gradients of the accumulator's dtype."""
    dtype = accumulator.dtype
    if dtype != parameter.dtype and not hasattr(parameter, "grad_dtype"):
        raise ConfigError(
            f"cannot accumulate gradients in {dtype} for {parameter.dtype} parameters: "
            f"torch {torch.__version__} has no `grad_dtype`; upgrade torch or set "
            '`train.gradient_dtype = "parameter"`'
        )
    asked = getattr(parameter, "grad_dtype", None)
    if asked not in (None, dtype, parameter.dtype):
        raise ConfigError(
            f"cannot accumulate the gradients of `{accumulator.name}`: expected `grad_dtype` "
            f"{dtype} as of `train.gradient_dtype`, found {asked}; set one or the other"
        )


def _flat(shard: FlatShard, memory: memoryview, dtype: str) -> torch.Tensor:
    """Returns a shard's accumulators over its padded part of the region."""
    flat = storage_over(memory).view(getattr(torch, gradient_dtype_of(shard, dtype)))
    return flat[: shard.num_elements]


class RowGradient:
    """The gradient of a wide parameter, written by rows while backward computes it.

    `p.grad` shows it once `end` was called: what an error interrupts is not seen.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        memory: torch.Tensor,
        parameter: nn.Parameter,
        *,
        is_first: bool,
    ) -> None:
        self._accumulator = accumulator
        self._memory = memory
        self._parameter = parameter
        self._is_first = is_first

    def put(self, rows: slice, values: torch.Tensor) -> None:
        """Takes the gradient of consecutive rows; together the calls name every row once."""
        if self._is_first:
            self._memory[rows].copy_(values)
        else:
            self._memory[rows].add_(values.cpu())

    def scatter(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Takes the gradient of some rows, each named once; that of all others is zero."""
        if self._is_first:
            self._memory.zero_()
        self._memory.index_add_(0, rows.cpu(), values.cpu().to(self._memory.dtype))

    def end(self) -> None:
        """Shows the gradient as `p.grad`."""
        if self._is_first:
            self._parameter.grad = StreamedGradient(self._accumulator)
