"""What a kernel works on: tensors of one subgroup, and ranges of them with their scalars."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.layout import RULES
from offload.optim.scalars import Scalars, to_fp32

GRADIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements `start` to `stop - 1` of the operands: one parameter, or a part of it."""

    start: int
    stop: int
    scalars: Scalars


@dataclass(slots=True, kw_only=True)
class Operands:
    """One subgroup's tensors, updated in place except for the gradient, which is only read.

    Codec `split` has `master_low`, codec `fp32` has `master`; with neither the fp32 parameter is
    its own master.

    Shapes: All `(num_elements,)`, contiguous, on the CPU, none overlapping another.
    """

    rule: str = "adamw"
    parameter: Tensor  # bf16; fp32 without a master; fp16 with `master`
    gradient: Tensor  # bf16, fp16 or fp32
    state: dict[str, Tensor] = field(default_factory=dict)  # fp32, those of the rule
    master_low: Tensor | None = None  # int16
    master: Tensor | None = None  # fp32

    @property
    def codec(self) -> str:
        """`split`, `fp32`, or `parameter` where the parameter is the master."""
        if self.master_low is not None:
            return "split"
        return "fp32" if self.master is not None else "parameter"

    def part(self, start: int, stop: int) -> "Operands":
        """Returns views of elements `start` to `stop - 1`."""
        return replace(
            self,
            parameter=self.parameter[start:stop],
            gradient=self.gradient[start:stop],
            state={name: values[start:stop] for name, values in self.state.items()},
            master_low=None if self.master_low is None else self.master_low[start:stop],
            master=None if self.master is None else self.master[start:stop],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a pass found in one range; sums of squares as `Kernels.sums_of_squares` forms them."""

    gradient: float
    """Of the gradient, after its scales."""
    update: float
    """Of the new master less the old one, in fp32."""
    parameter: float
    """Of the new master."""
    num_nonfinite: int
    """Infinities and NaN in the gradient, before its scales."""


def check_operands(operands: Operands) -> None:
    """Checks what kernels rely on.

    Raises:
        ConfigError: The rule is unknown, or a tensor is missing or has the wrong dtype, shape,
            layout or device.
    """
    _check_rule(operands)
    if operands.master_low is not None and operands.master is not None:
        raise ConfigError("kernel operands: expected `master_low` or `master`, found both")
    num_elements = operands.parameter.numel()
    for name, tensor, dtypes in _expectations(operands):
        check_array(name, tensor, dtypes)
        if tensor.dim() != 1 or tensor.numel() != num_elements:
            raise ConfigError(
                f"kernel operand `{name}`: expected shape ({num_elements},) as `parameter` has, "
                f"found {tuple(tensor.shape)}"
            )


def check_array(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Checks that a kernel can read `tensor` as a plain array of one of `dtypes`.

    Raises:
        ConfigError: It is not contiguous, not on the CPU, misaligned, or of another dtype.
    """
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ConfigError(f"kernel operand `{name}`: expected {expected}, found {tensor.dtype}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(
            f"kernel operand `{name}`: expected a contiguous CPU tensor, found stride "
            f"{tensor.stride()} on `{tensor.device}`; pass a flat view of host memory"
        )
    if tensor.data_ptr() % tensor.element_size():
        raise ConfigError(
            f"kernel operand `{name}`: expected an address that is a multiple of "
            f"{tensor.element_size()} bytes, found {tensor.data_ptr():#x}"
        )


def check_ranges(ranges: Sequence[Range], num_elements: int) -> None:
    """Checks that ranges ascend within the operands and do not overlap.

    Raises:
        ConfigError: One does not.
    """
    end = 0
    for part in ranges:
        if not end <= part.start <= part.stop <= num_elements:
            raise ConfigError(
                f"kernel range {part.start}:{part.stop}: expected ascending ranges without "
                f"overlap within {end}:{num_elements}; sort and clip them"
            )
        end = part.stop


def check_accumulation(accumulator: Tensor, gradient: Tensor) -> None:
    """Checks that `gradient` can be added to `accumulator`.

    Raises:
        ConfigError: One is not a plain array on the CPU, or their sizes differ.
    """
    check_array("accumulator", accumulator, GRADIENT_DTYPES)
    check_array("gradient", gradient, GRADIENT_DTYPES)
    if accumulator.numel() != gradient.numel():
        raise ConfigError(
            f"cannot accumulate a gradient: expected {accumulator.numel()} elements as the "
            f"accumulator has, found {gradient.numel()}"
        )


def gradient_factors(scales: Sequence[float]) -> tuple[float, ...]:
    """Returns the factors of the gradient as fp32 values, without those that are exactly 1.

    Raises:
        ConfigError: There are more than two.
    """
    if len(scales) > 2:
        raise ConfigError(
            f"gradient scales: expected at most 2 factors, found {len(scales)}; multiply earlier "
            "ones onto the gradient"
        )
    return tuple(factor for factor in map(to_fp32, scales) if factor != 1.0)


def _check_rule(operands: Operands) -> None:
    rules = [rule for rule in RULES if rule != "muon"]
    if operands.rule not in rules:
        raise ConfigError(
            f"no kernel for the update rule `{operands.rule}`: expected one of {', '.join(rules)}"
        )
    if set(operands.state) != set(RULES[operands.rule]):
        raise ConfigError(
            f"kernel operands of `{operands.rule}`: expected the state "
            f"{', '.join(RULES[operands.rule]) or 'none'}, found "
            f"{', '.join(operands.state) or 'none'}"
        )


def _expectations(o: Operands) -> Iterator[tuple[str, Tensor, tuple[torch.dtype, ...]]]:
    parameter_dtypes = {
        "split": (torch.bfloat16,),
        "fp32": (torch.bfloat16, torch.float16),
        "parameter": (torch.float32,),
    }
    yield "parameter", o.parameter, parameter_dtypes[o.codec]
    yield "gradient", o.gradient, GRADIENT_DTYPES
    for name, values in o.state.items():
        yield name, values, (torch.float32,)
    if o.master_low is not None:
        yield "master_low", o.master_low, (torch.int16,)
    if o.master is not None:
        yield "master", o.master, (torch.float32,)
