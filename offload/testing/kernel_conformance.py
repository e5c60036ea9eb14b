"""What every implementation of `offload.optim.kernels.Kernels` must satisfy, bit for bit.

Subclass `KernelConformance` in a test module and name the kernels:

    class TestScalar(KernelConformance):
        name = "scalar"
"""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from offload.errors import ConfigError
from offload.optim.kernels import AdamWRange, Kernels, adamw_scalars, kernel_names, load_kernels
from offload.testing import kernel_oracle as oracle
from offload.testing.kernel_cases import (
    COMBINATIONS,
    GRADIENT_DTYPES,
    OPTIONS,
    any_bits_case,
    assert_equal,
    assert_same_parameter,
    bits,
    copied,
    floats,
    gradient_of,
    half_bits,
    make_case,
    master_of,
    nan_with_payload,
    random_case,
    random_values,
    sliced,
    special_case,
    stepped,
    whole,
)

# Whole vectors and norm steps ± 1 on either side, and every tail between them.
SIZES = tuple(range(130))
# Several slices and norm blocks, more than one piece of the torch reference, and a tail.
LARGE = (1 << 20) + 17


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
        case = special_case(20_000, codec, dtype)
        options = OPTIONS | {"eps": eps}

        kernels.adamw(case.operands, [whole(20_000, options)])

        assert_equal(case.operands, stepped(case, options))

    @pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
    def test_any_bits_equal_the_oracle(
        self, kernels: Kernels, codec: str, dtype: torch.dtype
    ) -> None:
        case = any_bits_case(30_000, codec, dtype)

        kernels.adamw(case.operands, [whole(30_000)], gradient_scales=(0.5, 3.0))

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
        # Three slices of 65,536 elements and a tail, cut at and beside their borders.
        size = 200_001
        cuts = (0, 1, 63, 4096, 65_537, 131_072, size)
        case = random_case(size, "split", torch.bfloat16, seed=5)
        expected = stepped(case)
        ranges = [
            AdamWRange(start=start, stop=stop, scalars=adamw_scalars(**OPTIONS))
            for start, stop in itertools.pairwise(cuts)
        ]

        for num_threads in (1, 2, 3, 8):
            operands = copied(case.operands)
            load_kernels(kernels.name, num_threads=num_threads).adamw(operands, ranges)
            assert_equal(operands, expected)
        operands = copied(case.operands)
        for part in ranges:
            piece = sliced(operands, part.start, part.stop)
            kernels.adamw(piece, [whole(part.stop - part.start)])
        assert_equal(operands, expected)

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
    @pytest.mark.parametrize("factors", [(), (0.1,), (0.1, 0.3), (np.inf,)])
    def test_sums_of_squares_equal_the_oracle(
        self, kernels: Kernels, dtype: torch.dtype, factors: tuple[float, ...]
    ) -> None:
        # Every tail, a block ± 1, several tasks of blocks.
        sizes = (*SIZES, 4095, 4096, 4097, 12_288, 70_001)
        gradients = [gradient_of(random_values(size, seed=size) * 1e3, dtype) for size in sizes]

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
