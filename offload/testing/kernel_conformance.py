"""What every implementation of `offload.optim.kernels.Kernels` must satisfy, bit for bit.

Subclass `KernelConformance` in a test module and name the kernels:

    class TestScalar(KernelConformance):
        name = "scalar"
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from offload.errors import ConfigError
from offload.optim.kernels import Kernels, Range, adamw_scalars, kernel_names, load_kernels
from offload.testing import kernel_oracle as oracle
from offload.testing.kernel_cases import (
    COMBINATIONS,
    GRADIENT_DTYPES,
    OPTIONS,
    RULE_OPTIONS,
    SPECIAL_BITS,
    TYPICAL,
    any_bits_case,
    assert_equal,
    assert_same_parameter,
    bits,
    copied,
    far_away,
    floats,
    gradient_of,
    make_case,
    master_of,
    nan_with_payload,
    random_case,
    random_values,
    special_case,
    stepped,
    whole,
)

# Whole vectors and norm steps ± 1 on either side, and every tail between them.
SIZES = tuple(range(130))
# Below, at and above whole vectors of every width.
FEW_SIZES = (0, 1, 7, 8, 15, 17, 31, 32, 33, 64, 129, 1000)
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

    @pytest.mark.parametrize(("form", "dtype"), COMBINATIONS)
    def test_every_small_size_equals_the_oracle(
        self, kernels: Kernels, form: str, dtype: torch.dtype
    ) -> None:
        for size in SIZES:
            case = random_case(size, form, dtype, seed=size)

            kernels.update(case.operands, [whole(size)])

            assert_equal(case.operands, stepped(case))

    @pytest.mark.parametrize(("form", "dtype"), TYPICAL)
    def test_a_large_array_equals_the_oracle(
        self, kernels: Kernels, form: str, dtype: torch.dtype
    ) -> None:
        case = random_case(LARGE, form, dtype, seed=1)
        before = case.operands.gradient.clone()

        kernels.update(case.operands, [whole(LARGE)])

        assert_equal(case.operands, stepped(case))
        assert torch.equal(case.operands.gradient, before)

    @pytest.mark.parametrize(("form", "dtype"), TYPICAL)
    def test_a_prepared_update_reads_the_memory_of_each_step(
        self, kernels: Kernels, form: str, dtype: torch.dtype
    ) -> None:
        case, again = (random_case(200, form, dtype, seed=4) for _ in range(2))
        update = kernels.prepare(case.operands)

        for factors in ((), (0.5,), ()):
            update([whole(200)], gradient_scales=factors)
            kernels.update(again.operands, [whole(200)], gradient_scales=factors)
            for each in (case, again):
                each.operands.gradient.neg_()

        found, expected = case.operands, again.operands
        assert np.array_equal(bits(found.parameter), bits(expected.parameter))
        assert np.array_equal(bits(master_of(found)), bits(master_of(expected)))
        for name, values in found.state.items():
            assert np.array_equal(bits(values), bits(expected.state[name])), name
        with pytest.raises(ConfigError, match="overlap"):
            update([whole(200), whole(200)])

    @pytest.mark.parametrize(("form", "dtype"), TYPICAL)
    def test_misaligned_views_equal_the_oracle(
        self, kernels: Kernels, form: str, dtype: torch.dtype
    ) -> None:
        # Each operand at another offset from 64 bytes, down to one element.
        for shift in (1, 3, 8, 17, 31):
            case = random_case(200, form, dtype, seed=shift, shifts=(shift, 1, 5, 2, 7))

            kernels.update(case.operands, [whole(200)])

            assert_equal(case.operands, stepped(case))

    @pytest.mark.parametrize(("form", "dtype"), COMBINATIONS)
    def test_elements_across_2_to_the_31_equal_those_of_small_arrays(
        self, kernels: Kernels, form: str, dtype: torch.dtype
    ) -> None:
        size, start = 5000, (1 << 31) - 2999
        for rule, options in {"adamw": OPTIONS, **dict(RULE_OPTIONS)}.items():
            near = random_case(size, form, dtype, seed=3, rule=rule)
            far = far_away(near.operands, start)
            part = whole(size, options, rule=rule)
            there = replace(part, start=start, stop=start + size)
            expected = stepped(near, options)

            kernels.update(far, [there])

            assert_equal(far.part(start, start + size), expected)
            kernels.update(near.operands, [part])
            found = kernels.measured_update(far, [there], gradient_scales=(0.5,))
            assert found == kernels.measured_update(near.operands, [part], gradient_scales=(0.5,))
            part_of_far = far.part(start, start + size)
            assert np.array_equal(bits(part_of_far.parameter), bits(near.operands.parameter))

    @pytest.mark.parametrize(("form", "dtype"), TYPICAL)
    def test_ranges_have_their_own_scalars_and_gaps_are_untouched(
        self, kernels: Kernels, form: str, dtype: torch.dtype
    ) -> None:
        size = (1 << 17) + 5
        # One element, an odd border, a border of slices inside, empty, up to the end.
        borders = ((3, 4), (17, 1000), (1000, 70001), (70001, 70001), (80000, size))
        steps = [OPTIONS | {"step": 7 * i + 1, "lr": 1e-3 * (i + 1)} for i in range(5)]
        case = random_case(size, form, dtype, seed=2)
        # A NaN that a write would change shows that nothing was written.
        case.operands.state["exp_avg"][75000:76000] = nan_with_payload()
        before = bits(case.operands.state["exp_avg"]).copy()
        ranges = [
            Range(start=start, stop=stop, scalars=adamw_scalars(**options))
            for (start, stop), options in zip(borders, steps, strict=True)
        ]

        kernels.update(case.operands, ranges)

        for (start, stop), options in zip(borders, steps, strict=True):
            part = oracle.update(
                "adamw", case.state.part(start, stop), case.gradient[start:stop], options
            )
            assert_equal(case.operands.part(start, stop), part)
        for start, stop in ((0, 3), (4, 17), (70001, 80000)):
            assert_same_parameter(case.operands.part(start, stop), case.state.part(start, stop))
            assert np.array_equal(
                bits(case.operands.state["exp_avg"])[start:stop], before[start:stop]
            )

    @pytest.mark.parametrize(("form", "dtype"), TYPICAL)
    @pytest.mark.parametrize(
        "factors", [(), (1.0,), (0.1,), (1.0, 0.3), (0.1, 0.3), (1 / 65536, 0.7), (0.0,)]
    )
    def test_gradient_factors_are_applied_in_order(
        self, kernels: Kernels, form: str, dtype: torch.dtype, factors: tuple[float, ...]
    ) -> None:
        case = random_case(1000, form, dtype, seed=3)

        kernels.update(case.operands, [whole(1000)], gradient_scales=factors)

        assert_equal(case.operands, stepped(case, factors=factors))

    @pytest.mark.parametrize(("form", "dtype"), COMBINATIONS)
    @pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-45])
    def test_special_values_equal_the_oracle(
        self, kernels: Kernels, form: str, dtype: torch.dtype, eps: float
    ) -> None:
        case = special_case(20_000, form, dtype)
        options = OPTIONS | {"eps": eps}

        kernels.update(case.operands, [whole(20_000, options)])

        assert_equal(case.operands, stepped(case, options))

    @pytest.mark.parametrize(("form", "dtype"), TYPICAL)
    def test_any_bits_equal_the_oracle(
        self, kernels: Kernels, form: str, dtype: torch.dtype
    ) -> None:
        case = any_bits_case(30_000, form, dtype)

        kernels.update(case.operands, [whole(30_000)], gradient_scales=(0.5, 3.0))

        assert_equal(case.operands, stepped(case, factors=(0.5, 3.0)))

    @pytest.mark.parametrize("codec", ["split", "fp32"])
    def test_ties_round_away_from_zero(self, kernels: Kernels, codec: str) -> None:
        # lr = 0 keeps the master: every bf16 value but NaN, and half a unit more.
        high = np.arange(1 << 16, dtype=np.uint32)
        tie = ((high << 16) | 0x8000).view(np.float32)
        tie = tie[np.isfinite(tie)]
        zeros = np.zeros_like(tie)
        case = make_case(tie, zeros, zeros, zeros, codec, torch.bfloat16)

        kernels.update(case.operands, [whole(len(tie), OPTIONS | {"lr": 0.0})])

        away = (tie.view(np.uint32) >> 16) + 1
        assert np.array_equal(bits(case.operands.parameter), away.astype(np.uint16))
        assert np.array_equal(bits(master_of(case.operands)), tie.view(np.uint32))

    @pytest.mark.parametrize(("form", "dtype"), TYPICAL)
    @pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5, 0.50000001, 0.5000001, 0.51])
    def test_a_small_beta1_interpolates_from_the_gradient(
        self, kernels: Kernels, form: str, dtype: torch.dtype, beta1: float
    ) -> None:
        case = random_case(3000, form, dtype, seed=4)
        options = OPTIONS | {"betas": (beta1, 0.0)}

        kernels.update(case.operands, [whole(3000, options)])

        assert_equal(case.operands, stepped(case, options))

    def test_any_number_of_threads_and_any_cut_give_the_same_bits(self, kernels: Kernels) -> None:
        # Three slices of 65,536 elements and a tail, cut at and beside their borders.
        size = 200_001
        cuts = (0, 1, 63, 4096, 65_537, 131_072, size)
        case = random_case(size, "split", torch.bfloat16, seed=5)
        expected = stepped(case)
        ranges = [
            Range(start=start, stop=stop, scalars=adamw_scalars(**OPTIONS))
            for start, stop in itertools.pairwise(cuts)
        ]

        for num_threads in (1, 2, 3, 8):
            operands = copied(case.operands)
            load_kernels(kernels.name, num_threads=num_threads).update(operands, ranges)
            assert_equal(operands, expected)
        operands = copied(case.operands)
        for part in ranges:
            piece = operands.part(part.start, part.stop)
            kernels.update(piece, [whole(part.stop - part.start)])
        assert_equal(operands, expected)

    @pytest.mark.parametrize("rule", ["adamw", "lion", "momentum", "adagrad"])
    def test_split_and_fp32_agree_after_1000_steps(self, kernels: Kernels, rule: str) -> None:
        split = random_case(1001, "split", torch.bfloat16, seed=6, rule=rule).operands
        fp32 = random_case(1001, "fp32", torch.bfloat16, seed=6, rule=rule).operands
        options = OPTIONS | {"lr": 0.01, "momentum": 0.9}
        generator = torch.Generator().manual_seed(0)

        for step in range(1, 1001):
            gradient = torch.randn(1001, generator=generator).to(torch.bfloat16)
            for operands in (split, fp32):
                operands.gradient = gradient
                kernels.update(operands, [whole(1001, options | {"step": step}, rule=rule)])

        assert np.array_equal(bits(split.parameter), bits(fp32.parameter))
        for name, values in split.state.items():
            assert np.array_equal(bits(values), bits(fp32.state[name]))
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
        least, most = (1e-7, 6e4) if dtype == torch.float16 else (1e-40, 3e38)
        tiny = gradient_of(np.full(40, least, np.float32), dtype)
        huge = gradient_of(np.full(40, most, np.float32), dtype)
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

    @pytest.mark.parametrize(("rule", "options"), RULE_OPTIONS)
    def test_every_rule_equals_the_oracle_for_every_pair_of_dtypes(
        self, kernels: Kernels, rule: str, options: dict[str, Any]
    ) -> None:
        for form, dtype in COMBINATIONS:
            for size in FEW_SIZES:
                case = random_case(size, form, dtype, seed=size, rule=rule)

                kernels.update(
                    case.operands, [whole(size, options, rule=rule)], gradient_scales=(0.1,)
                )

                assert_equal(case.operands, stepped(case, options, factors=(0.1,)))

    @pytest.mark.parametrize(("rule", "options"), RULE_OPTIONS)
    def test_every_rule_treats_special_values_as_the_oracle_does(
        self, kernels: Kernels, rule: str, options: dict[str, Any]
    ) -> None:
        for form, dtype in COMBINATIONS:
            for make in (special_case, any_bits_case):
                case = make(4001, form, dtype, rule=rule)

                kernels.update(case.operands, [whole(4001, options, rule=rule)])

                assert_equal(case.operands, stepped(case, options))

    @pytest.mark.parametrize(("form", "dtype"), TYPICAL)
    def test_a_measured_update_is_the_update_and_says_what_it_found(
        self, kernels: Kernels, form: str, dtype: torch.dtype
    ) -> None:
        # Blocks that end between vectors, one element, several tasks, a tail.
        borders = ((5, 5000), (5000, 5001), (5003, 150_001))
        case = random_case(150_003, form, dtype, seed=11)
        case.operands.gradient[[7, 5000, 6000, 6001]] = torch.inf
        case.gradient = floats(case.operands.gradient)
        ranges = [
            Range(start=start, stop=stop, scalars=adamw_scalars(**OPTIONS))
            for start, stop in borders
        ]

        found = kernels.measured_update(case.operands, ranges, gradient_scales=(0.5,))

        assert [s.num_nonfinite for s in found] == [1, 1, 2]
        for (start, stop), statistics in zip(borders, found, strict=True):
            before, gradient = case.state.part(start, stop), case.gradient[start:stop]
            after = oracle.update("adamw", before, gradient, OPTIONS, (0.5,))
            assert_equal(case.operands.part(start, stop), after)
            with np.errstate(all="ignore"):
                change = after.master - before.master
            expected = (
                oracle.sum_of_squares(gradient, (0.5,)),
                oracle.sum_of_squares(change),
                oracle.sum_of_squares(after.master),
            )
            sums = (statistics.gradient, statistics.update, statistics.parameter)
            assert np.array_equal(sums, expected, equal_nan=True)

    @pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
    def test_values_that_are_not_finite_are_counted(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        for size in (*SIZES, 70_001):
            gradient = torch.ones(size, dtype=dtype)
            gradient[::5] = torch.tensor([torch.nan, -torch.inf]).repeat(size)[: -(-size // 5)]
            gradient[::15] = torch.finfo(dtype).max

            assert kernels.count_nonfinite([gradient]) == [int((~gradient.isfinite()).sum())]
        assert kernels.count_nonfinite([]) == []

    @pytest.mark.parametrize("into", GRADIENT_DTYPES)
    @pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
    def test_accumulation_adds_in_fp32_and_rounds_to_nearest_even(
        self, kernels: Kernels, into: torch.dtype, dtype: torch.dtype
    ) -> None:
        for size in (*SIZES, 300_001):
            sums = gradient_of(random_values(size, seed=[size, 0]), into)
            gradient = gradient_of(random_values(size, seed=[size, 1]), dtype)
            expected = (sums.float() + gradient.float()).to(into)

            kernels.accumulate(sums, gradient)

            assert np.array_equal(bits(sums), bits(expected))

    @pytest.mark.parametrize("into", GRADIENT_DTYPES)
    def test_accumulation_rounds_special_values_as_fp32_does(
        self, kernels: Kernels, into: torch.dtype
    ) -> None:
        edges = np.array(SPECIAL_BITS, np.uint32)
        values = np.concatenate([edges, edges | np.uint32(1 << 31)]).view(np.float32)
        sums = gradient_of(np.repeat(values, len(values)), into)
        gradient = torch.from_numpy(np.tile(values, len(values)))
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(floats(sums) + gradient.numpy()).to(into)

        kernels.accumulate(sums, gradient)

        is_nan = expected.isnan()
        assert torch.equal(sums.isnan(), is_nan)
        assert np.array_equal(bits(sums[~is_nan]), bits(expected[~is_nan]))
        assert len(set(bits(sums[is_nan]).tolist())) == 1

    def test_wrong_gradients_are_refused(self, kernels: Kernels) -> None:
        with pytest.raises(ConfigError, match="4 elements.*found 3"):
            kernels.accumulate(torch.zeros(4), torch.zeros(3))
        with pytest.raises(ConfigError, match="contiguous"):
            kernels.accumulate(torch.zeros(8)[::2], torch.zeros(4))
        with pytest.raises(ConfigError, match="float64"):
            kernels.count_nonfinite([torch.zeros(4).double()])

    def test_wrong_operands_are_refused_before_anything_is_written(self, kernels: Kernels) -> None:
        def refuses(message: str, ranges: Sequence[Range] = (), **changes: Any) -> None:
            case = random_case(64, "split", torch.bfloat16, seed=9)
            for name, value in changes.items():
                setattr(case.operands, name, value)
            with pytest.raises(ConfigError, match=message):
                kernels.update(case.operands, ranges or [whole(64)])

        part = adamw_scalars(**OPTIONS)
        moments = {"exp_avg": torch.zeros(64), "exp_avg_sq": torch.zeros(64)}
        refuses("float32, found", state=moments | {"exp_avg": torch.zeros(64).double()})
        refuses("as `parameter` has", state=moments | {"exp_avg": torch.zeros(63)})
        refuses("contiguous", state=moments | {"exp_avg_sq": torch.zeros(128)[::2]})
        refuses("the state exp_avg, exp_avg_sq, found exp_avg", state={"exp_avg": torch.zeros(64)})
        refuses("no kernel for the update rule `amsgrad`", rule="amsgrad")
        refuses("contiguous", gradient=torch.zeros(64, device="meta"))
        refuses("found both", master=torch.zeros(64))
        refuses("ascending", [Range(start=0, stop=65, scalars=part)])
        refuses(
            "ascending",
            [
                Range(start=8, stop=16, scalars=part),
                Range(start=15, stop=20, scalars=part),
            ],
        )
        case = random_case(64, "split", torch.bfloat16, seed=9)
        with pytest.raises(ConfigError, match="at most 2"):
            kernels.update(case.operands, [whole(64)], gradient_scales=(2.0, 3.0, 4.0))
        assert_equal(case.operands, case.state)
