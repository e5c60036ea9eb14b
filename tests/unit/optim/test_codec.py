"""The codecs' bits against NumPy."""

import numpy as np
import torch

from offload.optim.codec import join_master, round_master, split_master

HIGH = np.arange(1 << 16, dtype=np.uint32) << 16
# Just below a tie, a tie, just above it, no low bits, all of them.
MASTERS = np.concatenate([HIGH | low for low in (0x7FFF, 0x8000, 0x8001, 0, 0xFFFF)])
FINITE_OR_INFINITE = MASTERS[~np.isnan(MASTERS.view(np.float32))]


def masters(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.float32).copy())


def test_split_rounds_ties_away_and_join_restores_every_bit() -> None:
    master = masters(FINITE_OR_INFINITE)

    split = split_master(master)

    rounded = (FINITE_OR_INFINITE + 0x8000) >> 16
    assert split.parameter.dtype == torch.bfloat16
    assert split.master_low.dtype == torch.int16
    found = split.parameter.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(found, rounded.astype(np.uint16))
    low = FINITE_OR_INFINITE.astype(np.int64) - (rounded.astype(np.int64) << 16)
    assert np.array_equal(split.master_low.numpy(), low)
    joined = join_master(split.parameter, split.master_low)
    assert np.array_equal(joined.numpy().view(np.uint32), FINITE_OR_INFINITE)
    assert torch.equal(round_master(master), split.parameter)


def test_every_nan_becomes_the_one_nan() -> None:
    nan = masters(MASTERS[np.isnan(MASTERS.view(np.float32))])

    split = split_master(nan)

    assert set(split.parameter.view(torch.int16).tolist()) == {0x7FC0}
    assert set(split.master_low.tolist()) == {0}
    joined = join_master(split.parameter, split.master_low)
    assert set(joined.view(torch.int32).tolist()) == {0x7FC00000}


def test_shapes_are_kept() -> None:
    split = split_master(torch.zeros(3, 0, 2))

    assert split.parameter.shape == split.master_low.shape == (3, 0, 2)
    assert join_master(split.parameter, split.master_low).shape == (3, 0, 2)
