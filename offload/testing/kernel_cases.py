"""Operands for the tests of kernels, beside the same state for the oracle; comparisons of bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.optim.kernels import AdamWOperands, AdamWRange, adamw_scalars
from offload.testing import kernel_oracle as oracle

CODECS = ("split", "fp32", "parameter")
GRADIENT_DTYPES = (torch.bfloat16, torch.float32)
COMBINATIONS = tuple((codec, dtype) for codec in CODECS for dtype in GRADIENT_DTYPES)
OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 3,
}
SPECIAL_BITS = (
    # Zero, the least and the greatest subnormal, the least normal, 2**-23.
    *(0, 1, 0x007FFFFF, 0x00800000, 0x34000000),
    # 1, a tie above it; just below, and at, a tie that carries into the exponent.
    *(0x3F800000, 0x3F808000, 0x3F7F7FFF, 0x3F7F8000),
    # The greatest fp32; ties and less that round to infinity and to the greatest bf16; infinity.
    *(0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000),
    oracle.NAN_BITS,
)


@dataclass(slots=True, kw_only=True)
class Case:
    """Operands in torch, and the same state and gradient for the oracle."""

    operands: AdamWOperands
    state: oracle.OracleState
    gradient: oracle.FloatArray


def whole(size: int, options: dict[str, Any] = OPTIONS) -> AdamWRange:
    """Returns the range of all elements."""
    return AdamWRange(start=0, stop=size, scalars=adamw_scalars(**options))


def stepped(
    case: Case, options: dict[str, Any] = OPTIONS, *, factors: tuple[float, ...] = ()
) -> oracle.OracleState:
    """Returns what the oracle makes of the case's first state."""
    return oracle.adamw(case.state, case.gradient, oracle.scalars(**options), factors)


def random_case(
    size: int, codec: str, dtype: torch.dtype, *, seed: int, shifts: Sequence[int] = (0,) * 5
) -> Case:
    """Returns ordinary values; `shifts` move each operand by that many elements."""
    master, m, v, gradient = (random_values(size, seed=[seed, i]) for i in range(4))
    return make_case(master, m * np.float32(0.1), v * v, gradient, codec, dtype, shifts)


def special_case(size: int, codec: str, dtype: torch.dtype) -> Case:
    """Returns zeros, subnormals, extremes, infinities, NaN and ties in all combinations."""
    edges = np.array(SPECIAL_BITS, np.uint32)
    values = np.concatenate([edges, edges | np.uint32(1 << 31)]).view(np.float32)
    rng = np.random.default_rng(7)
    master, m, v, gradient = (rng.choice(values, size) for _ in range(4))
    return make_case(one_nan(master), m, v, gradient, codec, dtype)


def any_bits_case(size: int, codec: str, dtype: torch.dtype) -> Case:
    """Returns operands of random bits, NaN with any payload in moments and gradients."""
    rng = np.random.default_rng(8)
    drawn = [rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32) for _ in range(4)]
    return make_case(one_nan(drawn[0]), drawn[1], drawn[2], drawn[3], codec, dtype)


def make_case(
    master: oracle.FloatArray,
    exp_avg: oracle.FloatArray,
    exp_avg_sq: oracle.FloatArray,
    gradient: oracle.FloatArray,
    codec: str,
    dtype: torch.dtype,
    shifts: Sequence[int] = (0,) * 5,
) -> Case:
    """Returns a case whose tensors hold these values."""
    parameter = tensor(oracle.bf16_of(master)).view(torch.bfloat16)
    if codec == "parameter":
        parameter = tensor(master)
    given = gradient_of(gradient, dtype)
    operands = AdamWOperands(
        parameter=shifted(parameter, shifts[0]),
        gradient=shifted(given, shifts[1]),
        exp_avg=shifted(tensor(exp_avg), shifts[2]),
        exp_avg_sq=shifted(tensor(exp_avg_sq), shifts[3]),
        master_low=shifted(tensor(oracle.low_of(master)), shifts[4]) if codec == "split" else None,
        master=shifted(tensor(master), shifts[4]) if codec == "fp32" else None,
    )
    state = oracle.OracleState(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    return Case(operands=operands, state=state, gradient=floats(given))


def gradient_of(values: oracle.FloatArray, dtype: torch.dtype) -> Tensor:
    """Returns a gradient; for bf16 the upper halves of the values' bits."""
    if dtype == torch.float32:
        return tensor(values)
    upper = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return tensor(upper).view(torch.bfloat16)


def shifted(values: Tensor, num_elements: int) -> Tensor:
    """Returns a copy that starts so many elements after a multiple of 64 bytes."""
    memory = torch.empty(values.numel() + num_elements + 64, dtype=values.dtype)
    skew = -memory.data_ptr() % 64 // memory.element_size()
    view = memory[skew + num_elements :][: values.numel()]
    view.copy_(values)
    # A copy may quiet a signalling NaN: move the bits instead.
    integers = {2: torch.int16, 4: torch.int32}[values.element_size()]
    view.view(integers).copy_(values.view(integers))
    return view


def sliced(o: AdamWOperands, start: int, stop: int) -> AdamWOperands:
    """Returns views of elements `start` to `stop - 1`."""
    return AdamWOperands(
        parameter=o.parameter[start:stop],
        gradient=o.gradient[start:stop],
        exp_avg=o.exp_avg[start:stop],
        exp_avg_sq=o.exp_avg_sq[start:stop],
        master_low=None if o.master_low is None else o.master_low[start:stop],
        master=None if o.master is None else o.master[start:stop],
    )


def copied(o: AdamWOperands) -> AdamWOperands:
    """Returns operands with memory of their own."""
    whole_copy = sliced(o, 0, o.parameter.numel())
    for name in ("parameter", "exp_avg", "exp_avg_sq", "master_low", "master"):
        values = getattr(o, name)
        setattr(whole_copy, name, None if values is None else values.clone())
    return whole_copy


def assert_equal(operands: AdamWOperands, expected: oracle.OracleState) -> None:
    """Asserts that parameter, master and moments have the oracle's bits."""
    assert_same_parameter(operands, expected)
    assert np.array_equal(bits(operands.exp_avg), expected.exp_avg.view(np.uint32))
    assert np.array_equal(bits(operands.exp_avg_sq), expected.exp_avg_sq.view(np.uint32))


def assert_same_parameter(operands: AdamWOperands, expected: oracle.OracleState) -> None:
    """Asserts that parameter and master have the oracle's bits."""
    found = bits(operands.parameter)
    if operands.codec == "parameter":
        assert np.array_equal(found, expected.master.view(np.uint32))
        return
    assert np.array_equal(found, oracle.bf16_of(expected.master))
    if operands.master_low is not None:
        low = oracle.low_of(expected.master)
        assert np.array_equal(bits(operands.master_low), low.view(np.uint16))
    else:
        assert np.array_equal(bits(master_of(operands)), expected.master.view(np.uint32))


def master_of(operands: AdamWOperands) -> Tensor:
    """Returns the fp32 master, joined from its halves where it is split."""
    if operands.master is not None:
        return operands.master
    if operands.master_low is None:
        return operands.parameter
    high = bits(operands.parameter).astype(np.int64) << 16
    low = bits(operands.master_low).view(np.int16).astype(np.int64)
    return tensor((high + low).astype(np.uint32).view(np.float32))


def bits(values: Tensor) -> NDArray[Any]:
    """Returns the bits as unsigned integers."""
    integers = {2: torch.int16, 4: torch.int32}[values.element_size()]
    unsigned = {2: np.uint16, 4: np.uint32}[values.element_size()]
    array: NDArray[Any] = values.view(integers).numpy().view(unsigned)
    return array


def floats(values: Tensor) -> oracle.FloatArray:
    """Returns the fp32 values of a gradient."""
    if values.dtype == torch.float16:
        half: oracle.FloatArray = values.numpy().astype(np.float32)
        return half
    if values.dtype == torch.bfloat16:
        return oracle.fp32_of(bits(values))
    return bits(values).view(np.float32)


def half_bits(values: oracle.FloatArray) -> NDArray[np.uint16]:
    """Returns the bits of NumPy's rounding to fp16."""
    return values.astype(np.float16).view(np.uint16)


def random_values(size: int, *, seed: int | list[int]) -> oracle.FloatArray:
    """Returns normally distributed fp32 values."""
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def one_nan(values: oracle.FloatArray) -> oracle.FloatArray:
    """Returns the values with every NaN replaced by the one that kernels write."""
    found = np.where(np.isnan(values), np.uint32(oracle.NAN_BITS), values.view(np.uint32))
    return found.view(np.float32)


def tensor(values: NDArray[Any]) -> Tensor:
    """Returns a copy as a tensor; unsigned 16-bit values as int16."""
    signed = values.view(np.int16) if values.dtype == np.uint16 else values
    return torch.from_numpy(signed.copy())


def nan_with_payload() -> Tensor:
    """Returns one NaN that differs from the one that kernels write."""
    return torch.tensor([0x7FC01234], dtype=torch.int32).view(torch.float32)
