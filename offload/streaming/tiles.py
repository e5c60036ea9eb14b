"""Linear layers and embeddings whose weight no slot holds: computed by tiles and by rows.

[Note: how a wide parameter is used]
A linear layer takes its weight in tiles of consecutive rows, each in a slot, the next one read
ahead where a slot is free; an embedding brings only the rows that a call names. Backward reads
tiles again for the input's gradient and writes the weight's straight into its accumulator, rows
by rows, so no tensor of the weight's size exists on the device. Autograd gets no gradient for the
weight, but still runs the node that would have taken it, and with it what follows a gradient.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from offload.errors import StoreError
from offload.plan.tiles import covering, tile_rows
from offload.streaming.gradients import RowGradient
from offload.streaming.part_reads import PartRead
from offload.streaming.residency import Residency
from offload.streaming.torch_private import will_run_in_backward
from offload.streaming.unit import CopyState, StreamedUnit
from offload.streaming.versions import modified_message

BeginRows = Callable[[nn.Parameter], RowGradient]


class WideWeight:
    """The weight of a module, in pieces."""

    def __init__(
        self, unit: StreamedUnit, residency: Residency, begin_rows: BeginRows | None
    ) -> None:
        """Stores its arguments; `begin_rows` is None where the model is not trained."""
        self.parameter = unit.bindings[0].parameter
        self.name = unit.bindings[0].name
        self._unit = unit
        self._residency = residency
        self._begin_rows = begin_rows
        self._starts = [part.start for part in unit.subgroups]

    @property
    def num_rows(self) -> int:
        return self.parameter.shape[0]

    @property
    def _row_bytes(self) -> int:
        return self.parameter.shape[1] * self.parameter.element_size()

    def row_slices(self) -> list[slice]:
        """Returns the rows of each tile."""
        step = tile_rows(self._residency.slot_bytes, self._row_bytes)
        ends = range(0, self.num_rows, step)
        return [slice(first, min(first + step, self.num_rows)) for first in ends]

    def tiles(self, *, is_backward: bool) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields rows and their values.

        Ownership: The caller drops values before it asks for more: the next need their slot.
        """
        self._residency.note_wide(self._unit, is_backward=is_backward)
        yield from self._read(self.row_slices())

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns the values of some rows.

        Args:
            indices: On the CPU, ascending, each once.
        """
        self._residency.note_wide(self._unit, is_backward=False)
        found = torch.empty(
            (len(indices), self.parameter.shape[1]),
            dtype=self.parameter.dtype,
            device=self.parameter.device,
        )
        done = 0
        for rows, values in self._read(self._slices_with(indices.tolist())):
            stop = int(torch.searchsorted(indices, rows.stop))
            inside = indices[done:stop].to(values.device) - rows.start
            torch.index_select(values, 0, inside, out=found[done:stop])
            del values
            done = stop
        return found

    def gradient(self, node: Node) -> RowGradient | None:
        """Returns where this backward puts the weight's gradient; None where it asks for none.

        Args:
            node: What would accumulate it in this graph.

        Raises:
            StoreError: Something asks for that gradient as a tensor.
        """
        if self._begin_rows is None:
            return None
        if self.parameter._backward_hooks:
            raise StoreError(
                f"cannot compute the gradient of `{self.name}`: expected no hook on it, found one "
                "of `register_hook`; the weight is computed in pieces and its gradient is never a "
                "tensor; use `register_post_accumulate_grad_hook`, or raise the memory budget"
            )
        try:
            is_asked_for = will_run_in_backward(node)
        except RuntimeError as error:  # `autograd.grad` for the weight
            raise StoreError(
                f"cannot return the gradient of `{self.name}` from `autograd.grad`: the weight is "
                "computed in pieces and its gradient is never a tensor; use `backward`, or raise "
                "the memory budget"
            ) from error
        return self._begin_rows(self.parameter) if is_asked_for else None

    def require_version(self, expected: int) -> None:
        """Raises RuntimeError, as torch, if the weight has changed since a forward."""
        found = self.parameter._version
        if found != expected:
            what = f"parameter `{self.name}`"
            raise RuntimeError(modified_message(what, found=found, expected=expected))

    def _slices_with(self, indices: list[int]) -> list[slice]:
        """Joins rows that are read together: neighbours in storage, no more than a tile."""
        largest = tile_rows(self._residency.slot_bytes, self._row_bytes)
        slices: list[slice] = []
        last = range(0)
        for index in indices:
            part = self._bytes_of(slice(index, index + 1))
            begin = slices[-1].start if slices else 0
            if slices and part.start <= last.stop and index + 1 - begin <= largest:
                slices[-1] = slice(begin, index + 1)
            else:
                slices.append(slice(index, index + 1))
            last = part
        return slices

    def _bytes_of(self, rows: slice) -> range:
        return covering(
            range(rows.start * self._row_bytes, rows.stop * self._row_bytes),
            starts=self._starts,
            granule_bytes=self._residency.parts.granule_bytes,
            num_bytes=self._unit.layout.num_bytes,
        )

    def _read(self, slices: list[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        if self._unit.state is CopyState.CLEAN:  # someone looked at it, and may have edited it
            for rows in slices:
                yield rows, self.parameter.detach()[rows]
            return
        following: PartRead | None = None
        try:
            for index, rows in enumerate(slices):
                read = following or self._residency.parts.start(self._unit, self._bytes_of(rows))
                following = None
                if index + 1 < len(slices):
                    ahead = self._bytes_of(slices[index + 1])
                    following = self._residency.parts.try_start(self._unit, ahead)
                yield rows, self._view(self._residency.parts.finish(read), read.part, rows)
                del read
        finally:
            if following is not None:  # the caller failed: nothing may write to a free slot
                self._residency.parts.drop(following)

    def _view(self, memory: torch.Tensor, part: range, rows: slice) -> torch.Tensor:
        first = rows.start * self._row_bytes - part.start
        stop = rows.stop * self._row_bytes - part.start
        shape = rows.stop - rows.start, self.parameter.shape[1]
        return memory[first:stop].view(self.parameter.dtype).view(shape)


def forward_of(module: nn.Module, weight: WideWeight) -> Callable[..., torch.Tensor]:
    """Returns what computes a call of `module` in pieces."""
    if isinstance(module, nn.Linear):
        bias_of = module

        def linear(inputs: torch.Tensor) -> torch.Tensor:
            return _linear(inputs, weight, bias_of.bias)

        return linear
    assert isinstance(module, nn.Embedding)
    padding = module.padding_idx
    by_frequency = module.scale_grad_by_freq

    def embedding(inputs: torch.Tensor) -> torch.Tensor:
        return _Rows.apply(inputs, weight.parameter, weight, padding, by_frequency)  # type: ignore[no-any-return, no-untyped-call]

    return embedding


def _linear(inputs: torch.Tensor, weight: WideWeight, bias: torch.Tensor | None) -> torch.Tensor:
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind) and inputs.is_floating_point():
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            lower = None if bias is None else bias.to(dtype)
            return _Tiles.apply(inputs.to(dtype), weight.parameter, lower, weight, dtype)  # type: ignore[no-any-return, no-untyped-call]
    return _Tiles.apply(inputs, weight.parameter, bias, weight, weight.parameter.dtype)  # type: ignore[no-any-return, no-untyped-call]


class _Tiles(torch.autograd.Function):
    """`x @ weight.T + bias` in tiles of rows of the weight; see the note of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        parameter: nn.Parameter,
        bias: torch.Tensor | None,
        weight: WideWeight,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        output = x.new_empty((*x.shape[:-1], weight.num_rows))
        for rows, values in weight.tiles(is_backward=False):
            part = None if bias is None else bias[rows]
            output[..., rows] = nn.functional.linear(x, values.to(dtype), part)
            del values
        ctx.save_for_backward(x)
        ctx.weight, ctx.version, ctx.dtype = weight, parameter._version, dtype
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight: WideWeight = ctx.weight
        weight.require_version(ctx.version)
        by_row = gradient.reshape(-1, weight.num_rows)
        into = _gradient_of_weight(ctx)
        if into is not None:
            flat = x.reshape(-1, x.shape[-1])
            for rows in weight.row_slices():
                into.put(rows, by_row[:, rows].T @ flat)
            into.end()
        of_bias = by_row.sum(0) if ctx.needs_input_grad[2] else None
        of_x = _gradient_of_input(ctx, x, by_row) if ctx.needs_input_grad[0] else None
        return of_x, None, of_bias, None, None


def _gradient_of_weight(ctx: Any) -> RowGradient | None:
    """Returns where the gradient of the second input goes; None where nobody asks for it."""
    if not ctx.needs_input_grad[1]:
        return None
    weight: WideWeight = ctx.weight
    return weight.gradient(ctx.next_functions[1][0])


def _gradient_of_input(ctx: Any, x: torch.Tensor, by_row: torch.Tensor) -> torch.Tensor:
    """Sums over tiles in fp32 at least, rounded once."""
    wider = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros((len(by_row), x.shape[-1]), dtype=wider, device=x.device)
    for rows, values in ctx.weight.tiles(is_backward=True):
        total += by_row[:, rows] @ values.to(ctx.dtype)
        del values
    return total.to(x.dtype).view(x.shape)


class _Rows(torch.autograd.Function):
    """A lookup that brings only the rows that it names."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        parameter: nn.Parameter,
        weight: WideWeight,
        padding: int | None,
        by_frequency: bool,
    ) -> torch.Tensor:
        del parameter
        indices, inverse = torch.unique(inputs, return_inverse=True)
        named = indices.cpu()
        if len(named) and not (named[0] >= 0 and named[-1] < weight.num_rows):
            raise IndexError("index out of range in self")
        ctx.save_for_backward(inverse)
        ctx.indices, ctx.weight, ctx.by_frequency = named, weight, by_frequency
        ctx.padding = -1
        if padding is not None and (named == padding).any():
            ctx.padding = int(torch.searchsorted(named, padding))
        return nn.functional.embedding(inverse, weight.rows(named))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        into = _gradient_of_weight(ctx)
        if into is not None:
            of_rows = torch.ops.aten.embedding_dense_backward(
                gradient, inverse, len(ctx.indices), ctx.padding, ctx.by_frequency
            )
            into.scatter(ctx.indices, of_rows)
            into.end()
        return None, None, None, None, None
