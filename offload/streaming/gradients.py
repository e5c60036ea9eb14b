"""Gradients: taken as they appear, kept in the host arena, shown as `p.grad`."""

from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import nn

from offload.devices import Copy, CpuDevice, Device
from offload.errors import ConfigError, StoreError
from offload.layout import DTYPES, ModelLayout
from offload.layout.units import TRANSFER_ALIGNMENT
from offload.memory import storage_over
from offload.optim.gradient import Accumulator, StreamedGradient, SumsOfSquares
from offload.sizes import round_up


class Gradients:
    """The accumulators of a model's trainable parameters.

    The first gradient of a step is copied; autograd adds later ones into the accumulator itself,
    since `p.grad` is then a streamed gradient.

    Attributes:
        flat: The accumulators of each trainable flat shard, 1-D, in the layout of the shard.
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
    ) -> None:
        self.flat: dict[str, torch.Tensor] = {}
        self._parameters = parameters
        self._on_arrival = on_arrival
        self._accumulators: dict[nn.Parameter, Accumulator] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._device = CpuDevice() if device is None else device
        self._max_in_flight_bytes = max((unit.num_bytes for unit in layout.units), default=0)
        self._in_flight: deque[tuple[Copy, int]] = deque()
        self._in_flight_bytes = 0
        offset = 0
        for shard in layout.shards.values():
            if not shard.is_trainable:
                continue
            name = "float32" if dtype == "float32" else shard.dtype
            num_bytes = shard.num_elements * DTYPES[name].itemsize
            base = storage_over(region[offset : offset + num_bytes])
            offset += round_up(num_bytes, TRANSFER_ALIGNMENT)
            flat = base.view(getattr(torch, name))
            self.flat[shard.name] = flat
            for placed in shard.parameters:
                parameter = parameters[placed.facts.name]
                memory = flat[placed.start : placed.stop].view(placed.facts.shape)
                accumulator = Accumulator(
                    placed.facts.name,
                    memory,
                    sums_of_squares,
                    before_write,
                    device=self._device.torch_device,
                )
                self._accumulators[parameter] = accumulator
                self._prepare(parameter, memory.dtype)

    def accumulator_of(self, parameter: nn.Parameter) -> Accumulator | None:
        """Returns the gradient that the next update takes, or None if there is none.

        A gradient that the user assigned is taken into the accumulator first.
        """
        gradient = parameter.grad
        if gradient is None:
            return None
        accumulator = self._accumulators.get(parameter)
        if accumulator is None:
            name = next((n for n, p in self._parameters.items() if p is parameter), "?")
            raise ConfigError(
                f"cannot update parameter `{name}`: expected one that was trainable when the model "
                "was wrapped, found one that was frozen then and has a gradient now; set "
                "`requires_grad` before `wrap`"
            )
        if not isinstance(gradient, StreamedGradient):
            self._take(parameter, gradient.detach())
        elif gradient.accumulator is not accumulator:
            accumulator.start(gradient.accumulator.read())
            parameter.grad = StreamedGradient(accumulator)
        return accumulator

    def begin_rows(self, parameter: nn.Parameter) -> "RowGradient":
        """Returns where a backward writes the gradient of a wide parameter, by rows."""
        before = self.accumulator_of(parameter)  # takes in what the user assigned
        if before is not None:
            return RowGradient(before, before.writable(), parameter, is_first=False)
        accumulator = self._accumulators[parameter]
        return RowGradient(accumulator, accumulator.begin(), parameter, is_first=True)

    def settle(self) -> None:
        """Waits until every gradient has arrived in its accumulator."""
        while self._in_flight:
            self._end_oldest()

    def close(self) -> None:
        """Removes the hooks; gradients that are shown stay readable."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.settle()

    def _prepare(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        if dtype != parameter.dtype:
            if not hasattr(parameter, "grad_dtype"):
                raise ConfigError(
                    f"cannot accumulate gradients in {dtype} for {parameter.dtype} parameters: "
                    f"torch {torch.__version__} has no `grad_dtype`; upgrade torch or set "
                    '`train.gradient_dtype = "parameter"`'
                )
            parameter.grad_dtype = dtype
        if parameter.grad is not None:  # from before `wrap`
            self._take(parameter, parameter.grad.detach().to(dtype))
        handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            self._on_accumulated
        )
        self._handles.append(handle)

    def _on_accumulated(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        # None: a custom function returned none. A `grad_fn`: `create_graph`, torch still needs it.
        if gradient is None or gradient.grad_fn:
            return
        assert isinstance(parameter, nn.Parameter)
        if not isinstance(gradient, StreamedGradient):
            self._take(parameter, gradient)
        if self._on_arrival is not None:
            self._on_arrival(self._accumulators[parameter].name)

    def _take(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        accumulator = self._accumulators[parameter]
        if gradient.shape != accumulator.shape:
            raise StoreError(
                f"cannot take the gradient of `{accumulator.name}`: expected shape "
                f"{tuple(accumulator.shape)}, found {tuple(gradient.shape)}"
            )
        accumulator.start(
            gradient, start_copy=None if self._device.is_unified else self._start_copy
        )
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
        copy, num_bytes = self._in_flight.popleft()
        self._in_flight_bytes -= num_bytes
        copy.synchronize()


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
