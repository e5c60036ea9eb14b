"""Operands for the tests of kernels, beside the same state for the oracle; comparisons of bits."""

import inspect
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.layout import RULES
from offload.optim.kernels import (
    Operands,
    Range,
    Scalars,
    adagrad_scalars,
    adam_scalars,
    adamw_scalars,
    lion_scalars,
    sgd_scalars,
)
from offload.testing import kernel_oracle as oracle

FORMS = ("split", "fp32", "fp16", "parameter")
"""Codecs with parameters of bf16, bf16, fp16 and fp32."""
GRADIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COMBINATIONS = tuple((form, dtype) for form in FORMS for dtype in GRADIENT_DTYPES)
TYPICAL = (
    ("split", torch.bfloat16),
    ("split", torch.float32),
    ("fp32", torch.bfloat16),
    ("fp16", torch.float16),
    ("parameter", torch.float32),
)
"""Those that training uses, for what does not depend on dtypes."""
OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 3,
}
RULE_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("adam", OPTIONS),
    ("adam", OPTIONS | {"weight_decay": 0.0, "betas": (0.3, 0.95)}),
    ("lion", OPTIONS),
    ("sgd", OPTIONS),
    ("sgd", OPTIONS | {"weight_decay": 0.0}),
    ("momentum", OPTIONS | {"momentum": 0.9, "dampening": 0.1, "nesterov": False}),
    ("momentum", OPTIONS | {"momentum": 0.9, "dampening": 0.0, "nesterov": True}),
    ("momentum", OPTIONS | {"momentum": 0.9, "dampening": 0.5, "nesterov": False, "step": 1}),
    ("adagrad", OPTIONS | {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("adagrad", OPTIONS | {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "step": 1}),
)
"""Every rule but AdamW, with what changes its arithmetic."""
_MAP_NORESERVE = 0x4000
"""Address space only: pages that nobody touches take no memory. In `mmap` from Python 3.13 on."""
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

    operands: Operands
    state: oracle.OracleState
    gradient: oracle.FloatArray


def scalars_of(rule: str, options: dict[str, Any]) -> Scalars:
    """Returns the rule's scalars from the options that it takes."""
    make: Any = {
        "adamw": adamw_scalars,
        "adam": adam_scalars,
        "lion": lion_scalars,
        "sgd": sgd_scalars,
        "momentum": sgd_scalars,
        "adagrad": adagrad_scalars,
    }[rule]
    taken = inspect.signature(make).parameters
    scalars: Scalars = make(**{name: value for name, value in options.items() if name in taken})
    return scalars


def whole(size: int, options: dict[str, Any] = OPTIONS, *, rule: str = "adamw") -> Range:
    """Returns the range of all elements."""
    return Range(start=0, stop=size, scalars=scalars_of(rule, options))


def stepped(
    case: Case, options: dict[str, Any] = OPTIONS, *, factors: tuple[float, ...] = ()
) -> oracle.OracleState:
    """Returns what the oracle makes of the case's first state."""
    return oracle.update(case.operands.rule, case.state, case.gradient, options, factors)


def random_case(
    size: int,
    form: str,
    dtype: torch.dtype,
    *,
    seed: int,
    shifts: Sequence[int] = (0,) * 5,
    rule: str = "adamw",
) -> Case:
    """Returns ordinary values; `shifts` move each operand by that many elements."""
    master, m, v, gradient = (random_values(size, seed=[seed, i]) for i in range(4))
    return make_case(master, m * np.float32(0.1), v * v, gradient, form, dtype, shifts, rule=rule)


def special_case(size: int, form: str, dtype: torch.dtype, *, rule: str = "adamw") -> Case:
    """Returns zeros, subnormals, extremes, infinities, NaN and ties in all combinations."""
    edges = np.array(SPECIAL_BITS, np.uint32)
    values = np.concatenate([edges, edges | np.uint32(1 << 31)]).view(np.float32)
    rng = np.random.default_rng(7)
    master, m, v, gradient = (rng.choice(values, size) for _ in range(4))
    return make_case(one_nan(master), m, v, gradient, form, dtype, rule=rule)


def any_bits_case(size: int, form: str, dtype: torch.dtype, *, rule: str = "adamw") -> Case:
    """Returns operands of random bits, NaN with any payload in moments and gradients."""
    rng = np.random.default_rng(8)
    drawn = [rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32) for _ in range(4)]
    return make_case(one_nan(drawn[0]), drawn[1], drawn[2], drawn[3], form, dtype, rule=rule)


def make_case(
    master: oracle.FloatArray,
    first: oracle.FloatArray,
    second: oracle.FloatArray,
    gradient: oracle.FloatArray,
    form: str,
    dtype: torch.dtype,
    shifts: Sequence[int] = (0,) * 5,
    *,
    rule: str = "adamw",
) -> Case:
    """Returns a case whose tensors hold these values; `second` is for sums of squares."""
    state = {name: second if name in ("exp_avg_sq", "sum") else first for name in RULES[rule]}
    given = gradient_of(gradient, dtype)
    operands = Operands(
        rule=rule,
        parameter=shifted(_parameter_of(master, form), shifts[0]),
        gradient=shifted(given, shifts[1]),
        state={
            name: shifted(tensor(values), shift)
            for (name, values), shift in zip(state.items(), shifts[2:], strict=False)
        },
        master_low=shifted(tensor(oracle.low_of(master)), shifts[4]) if form == "split" else None,
        master=shifted(tensor(master), shifts[4]) if form in ("fp32", "fp16") else None,
    )
    return Case(
        operands=operands,
        state=oracle.OracleState(master=master, state=state),
        gradient=floats(given),
    )


def _parameter_of(master: oracle.FloatArray, form: str) -> Tensor:
    if form == "parameter":
        return tensor(master)
    if form == "fp16":
        return tensor(half_bits(master)).view(torch.float16)
    return tensor(oracle.bf16_of(master)).view(torch.bfloat16)


def gradient_of(values: oracle.FloatArray, dtype: torch.dtype) -> Tensor:
    """Returns a gradient; for bf16 the upper halves of the values' bits."""
    if dtype == torch.float32:
        return tensor(values)
    if dtype == torch.float16:
        return tensor(half_bits(values)).view(torch.float16)
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


def copied(o: Operands) -> Operands:
    """Returns operands with memory of their own."""
    copy = o.part(0, o.parameter.numel())
    copy.parameter = copy.parameter.clone()
    copy.state = {name: values.clone() for name, values in copy.state.items()}
    copy.master_low = None if copy.master_low is None else copy.master_low.clone()
    copy.master = None if copy.master is None else copy.master.clone()
    return copy


def far_away(o: Operands, start: int) -> Operands:
    """Returns operands with these values from element `start` on, and zeros that take no memory."""
    far = copied(o)
    far.parameter, far.gradient = _from(o.parameter, start), _from(o.gradient, start)
    far.state = {name: _from(values, start) for name, values in o.state.items()}
    far.master_low = None if o.master_low is None else _from(o.master_low, start)
    far.master = None if o.master is None else _from(o.master, start)
    return far


def _from(values: Tensor, start: int) -> Tensor:
    num_bytes = (start + values.numel()) * values.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    far = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=values.dtype)
    far[start:] = values
    return far


def assert_equal(operands: Operands, expected: oracle.OracleState) -> None:
    """Asserts that parameter, master and state have the oracle's bits."""
    assert_same_parameter(operands, expected)
    assert operands.state.keys() == expected.state.keys()
    for name, values in operands.state.items():
        assert np.array_equal(bits(values), expected.state[name].view(np.uint32)), name


def assert_same_parameter(operands: Operands, expected: oracle.OracleState) -> None:
    """Asserts that parameter and master have the oracle's bits."""
    found = bits(operands.parameter)
    if operands.codec == "parameter":
        assert np.array_equal(found, expected.master.view(np.uint32))
        return
    if operands.parameter.dtype == torch.float16:
        assert np.array_equal(found, half_bits(expected.master))
    else:
        assert np.array_equal(found, oracle.bf16_of(expected.master))
    if operands.master_low is not None:
        low = oracle.low_of(expected.master)
        assert np.array_equal(bits(operands.master_low), low.view(np.uint16))
    else:
        assert np.array_equal(bits(master_of(operands)), expected.master.view(np.uint32))


def master_of(operands: Operands) -> Tensor:
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
    with np.errstate(over="ignore"):
        half: NDArray[np.uint16] = values.astype(np.float16).view(np.uint16)
    return half


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
