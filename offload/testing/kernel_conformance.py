"""What every implementation of `offload.optim.kernels.Kernels` must satisfy, bit for bit.

Subclass `KernelConformance` in a test module and name the kernels:

    class TestScalar(KernelConformance):
        name = "scalar"
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.errors import ConfigError
from offload.optim.kernels import (
    AdamWOperands,
    AdamWRange,
    Kernels,
    adamw_scalars,
    kernel_names,
    load_kernels,
)
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
# Whole vectors and norm steps ± 1 on either side, and every tail between them.
SIZES = tuple(range(130))
# Several slices and norm blocks, more than one piece of the torch reference, and a tail.
LARGE = (1 << 20) + 17


@dataclass(slots=True, kw_only=True)
class Case:
    """Operands in torch, and the same state and gradient for the oracle."""

    operands: AdamWOperands
    state: oracle.OracleState
    gradient: oracle.FloatArray


class KernelConformance:
    """The contract; `name` says which kernels are held to it."""

    name: ClassVar[str]
    num_threads: ClassVar[int] = 2

    @pytest.fixture
    def kernels(self) -> Kernels:
        if self.name not in kernel_names():
            pytest.skip(f"kernels `{self.name}` do not run here")
        return load_kernels(self.name, num_threads=self.num_threads)

    def test_kernels_know_their_name(self, kernels: Kernels) -> None:
        assert kernels.name == self.name

    @pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
    def test_every_small_size_equals_the_oracle(
        self, kernels: Kernels, codec: str, dtype: torch.dtype
    ) -> None:
        for size in SIZES:
            case = random_case(size, codec, dtype, seed=size)

            kernels.adamw(case.operands, [whole(size)])

            assert_equal(case.operands, stepped(case))

    @pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
    def test_a_large_array_equals_the_oracle(
        self, kernels: Kernels, codec: str, dtype: torch.dtype
    ) -> None:
        case = random_case(LARGE, codec, dtype, seed=1)
        before = case.operands.gradient.clone()

        kernels.adamw(case.operands, [whole(LARGE)])

        assert_equal(case.operands, stepped(case))
        assert torch.equal(case.operands.gradient, before)

    @pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
    def test_misaligned_views_equal_the_oracle(
        self, kernels: Kernels, codec: str, dtype: torch.dtype
    ) -> None:
        # Each operand at another offset from 64 bytes, down to one element.
        for shift in (1, 3, 8, 17, 31):
            case = random_case(200, codec, dtype, seed=shift, shifts=(shift, 1, 5, 2, 7))

            kernels.adamw(case.operands, [whole(200)])

            assert_equal(case.operands, stepped(case))

    @pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
    def test_ranges_have_their_own_scalars_and_gaps_are_untouched(
        self, kernels: Kernels, codec: str, dtype: torch.dtype
    ) -> None:
        size = (1 << 17) + 5
        # One element, an odd border, a border of slices inside, empty, up to the end.
        borders = ((3, 4), (17, 1000), (1000, 70001), (70001, 70001), (80000, size))
        steps = [OPTIONS | {"step": 7 * i + 1, "lr": 1e-3 * (i + 1)} for i in range(5)]
        case = random_case(size, codec, dtype, seed=2)
        # A NaN that a write would change shows that nothing was written.
        case.operands.exp_avg[75000:76000] = nan_with_payload()
        before = bits(case.operands.exp_avg).copy()
        ranges = [
            AdamWRange(start=start, stop=stop, scalars=adamw_scalars(**options))
            for (start, stop), options in zip(borders, steps, strict=True)
        ]

        kernels.adamw(case.operands, ranges)

        for (start, stop), options in zip(borders, steps, strict=True):
            part = oracle.adamw(
                case.state.part(start, stop), case.gradient[start:stop], oracle.scalars(**options)
            )
            assert_equal(sliced(case.operands, start, stop), part)
        for start, stop in ((0, 3), (4, 17), (70001, 80000)):
            assert_same_parameter(sliced(case.operands, start, stop), case.state.part(start, stop))
            assert np.array_equal(bits(case.operands.exp_avg)[start:stop], before[start:stop])

    @pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
    @pytest.mark.parametrize(
        "factors", [(), (1.0,), (0.1,), (1.0, 0.3), (0.1, 0.3), (1 / 65536, 0.7), (0.0,)]
    )
    def test_gradient_factors_are_applied_in_order(
        self, kernels: Kernels, codec: str, dtype: torch.dtype, factors: tuple[float, ...]
    ) -> None:
        case = random_case(1000, codec, dtype, seed=3)

        kernels.adamw(case.operands, [whole(1000)], gradient_scales=factors)

        assert_equal(case.operands, stepped(case, factors=factors))

    @pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
    @pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-45])
    def test_special_values_equal_the_oracle(
        self, kernels: Kernels, codec: str, dtype: torch.dtype, eps: float
    ) -> None:
        case = special_case(50_000, codec, dtype)
        options = OPTIONS | {"eps": eps}

        kernels.adamw(case.operands, [whole(50_000, options)])

        assert_equal(case.operands, stepped(case, options))

    @pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
    def test_any_bits_equal_the_oracle(
        self, kernels: Kernels, codec: str, dtype: torch.dtype
    ) -> None:
        case = any_bits_case(100_000, codec, dtype)

        kernels.adamw(case.operands, [whole(100_000)], gradient_scales=(0.5, 3.0))

        assert_equal(case.operands, stepped(case, factors=(0.5, 3.0)))

    @pytest.mark.parametrize("codec", ["split", "fp32"])
    def test_ties_round_away_from_zero(self, kernels: Kernels, codec: str) -> None:
        # lr = 0 keeps the master: every bf16 value but NaN, and half a unit more.
        high = np.arange(1 << 16, dtype=np.uint32)
        tie = ((high << 16) | 0x8000).view(np.float32)
        tie = tie[np.isfinite(tie)]
        zeros = np.zeros_like(tie)
        case = make_case(tie, zeros, zeros, zeros, codec, torch.bfloat16)

        kernels.adamw(case.operands, [whole(len(tie), OPTIONS | {"lr": 0.0})])

        away = (tie.view(np.uint32) >> 16) + 1
        assert np.array_equal(bits(case.operands.parameter), away.astype(np.uint16))
        assert np.array_equal(bits(master_of(case.operands)), tie.view(np.uint32))

    @pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
    @pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5, 0.50000001, 0.5000001, 0.51])
    def test_a_small_beta1_interpolates_from_the_gradient(
        self, kernels: Kernels, codec: str, dtype: torch.dtype, beta1: float
    ) -> None:
        case = random_case(3000, codec, dtype, seed=4)
        options = OPTIONS | {"betas": (beta1, 0.0)}

        kernels.adamw(case.operands, [whole(3000, options)])

        assert_equal(case.operands, stepped(case, options))

    def test_any_number_of_threads_and_any_cut_give_the_same_bits(self, kernels: Kernels) -> None:
        size = 300_001
        cuts = (0, 1, 63, 4096, 65_537, 200_000, size)
        expected = stepped(random_case(size, "split", torch.bfloat16, seed=5))
        ranges = [
            AdamWRange(start=start, stop=stop, scalars=adamw_scalars(**OPTIONS))
            for start, stop in itertools.pairwise(cuts)
        ]

        for num_threads in (1, 2, 3, 8):
            case = random_case(size, "split", torch.bfloat16, seed=5)
            load_kernels(kernels.name, num_threads=num_threads).adamw(case.operands, ranges)
            assert_equal(case.operands, expected)
        for part in ranges:
            case = random_case(size, "split", torch.bfloat16, seed=5)
            piece = sliced(case.operands, part.start, part.stop)
            kernels.adamw(piece, [whole(part.stop - part.start)])
            assert_equal(piece, expected.part(part.start, part.stop))

    def test_split_and_fp32_agree_after_many_steps(self, kernels: Kernels) -> None:
        split = random_case(5001, "split", torch.bfloat16, seed=6).operands
        fp32 = random_case(5001, "fp32", torch.bfloat16, seed=6).operands
        generator = torch.Generator().manual_seed(0)

        for step in range(1, 51):
            gradient = torch.randn(5001, generator=generator).to(torch.bfloat16)
            for operands in (split, fp32):
                operands.gradient = gradient
                kernels.adamw(operands, [whole(5001, OPTIONS | {"step": step, "lr": 0.01})])

        for name in ("parameter", "exp_avg", "exp_avg_sq"):
            assert np.array_equal(bits(getattr(split, name)), bits(getattr(fp32, name)))
        assert np.array_equal(bits(master_of(split)), bits(master_of(fp32)))

    @pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
    @pytest.mark.parametrize("factors", [(), (0.1,), (0.1, 0.3)])
    def test_sums_of_squares_equal_the_oracle(
        self, kernels: Kernels, dtype: torch.dtype, factors: tuple[float, ...]
    ) -> None:
        # Every tail, a block ± 1, several tasks of blocks.
        sizes = (*SIZES, 4095, 4096, 4097, 12_288, 150_001)
        gradients = [gradient_of(random(size, seed=size) * 1e3, dtype) for size in sizes]

        sums = kernels.sums_of_squares(gradients, scales=factors)

        expected = [oracle.sum_of_squares(floats(g), factors) for g in gradients]
        assert [s.hex() for s in sums] == [s.hex() for s in expected]

    @pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
    def test_sums_of_squares_keep_subnormals_infinities_and_nan(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        tiny = gradient_of(np.full(40, 1e-40, np.float32), dtype)
        huge = gradient_of(np.full(40, 3e38, np.float32), dtype)
        infinite = gradient_of(np.array([1, -np.inf, 2], np.float32), dtype)
        nan = gradient_of(np.array([1, np.nan, np.inf], np.float32), dtype)

        sums = kernels.sums_of_squares([tiny, huge, infinite, nan])

        assert sums[0] == oracle.sum_of_squares(floats(tiny)) > 0
        assert sums[1] == oracle.sum_of_squares(floats(huge)) < np.inf
        assert sums[2] == np.inf
        assert np.isnan(sums[3])

    def test_sums_of_squares_of_nothing_are_nothing(self, kernels: Kernels) -> None:
        assert kernels.sums_of_squares([]) == []
        assert kernels.sums_of_squares([torch.empty(0)]) == [0.0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_float16_parameters_round_to_nearest_even(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        case = random_case(1000, "fp32", torch.float32, seed=8)
        case.operands.parameter = torch.empty(1000, dtype=torch.float16)
        case.operands.gradient = case.operands.gradient.to(dtype)
        case.gradient = floats(case.operands.gradient)

        kernels.adamw(case.operands, [whole(1000)])

        master = stepped(case).master
        assert np.array_equal(bits(case.operands.parameter.view(torch.int16)), half_bits(master))
        assert np.array_equal(bits(master_of(case.operands)), master.view(np.uint32))

    def test_wrong_operands_are_refused_before_anything_is_written(self, kernels: Kernels) -> None:
        def refuses(message: str, ranges: Sequence[AdamWRange] = (), **changes: Any) -> None:
            case = random_case(64, "split", torch.bfloat16, seed=9)
            for name, value in changes.items():
                setattr(case.operands, name, value)
            with pytest.raises(ConfigError, match=message):
                kernels.adamw(case.operands, ranges or [whole(64)])

        part = adamw_scalars(**OPTIONS)
        refuses("torch.float32, found torch.float64", exp_avg=torch.zeros(64).double())
        refuses("as `parameter` has", exp_avg=torch.zeros(63))
        refuses("contiguous", exp_avg_sq=torch.zeros(128)[::2])
        refuses("contiguous", gradient=torch.zeros(64, device="meta"))
        refuses("found both", master=torch.zeros(64))
        refuses("ascending", [AdamWRange(start=0, stop=65, scalars=part)])
        refuses(
            "ascending",
            [
                AdamWRange(start=8, stop=16, scalars=part),
                AdamWRange(start=15, stop=20, scalars=part),
            ],
        )
        case = random_case(64, "split", torch.bfloat16, seed=9)
        with pytest.raises(ConfigError, match="at most 2"):
            kernels.adamw(case.operands, [whole(64)], gradient_scales=(2.0, 3.0, 4.0))
        assert_equal(case.operands, case.state)


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
    master, m, v, gradient = (random(size, seed=[seed, i]) for i in range(4))
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


def random(size: int, *, seed: int | list[int]) -> oracle.FloatArray:
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
