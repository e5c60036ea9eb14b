import pytest

from offload.runs.schedule import learning_rate


@pytest.mark.parametrize("step, factor", [(1, 1 / 5), (4, 4 / 5), (5, 1.0), (6, 1.0), (30, 1.0)])
def test_rate_rises_over_the_warm_up_and_stays(step, factor):
    assert learning_rate(lr=6e-4, warmup_steps=5, step=step) == 6e-4 * factor


def test_no_warm_up_starts_at_the_full_rate():
    assert learning_rate(lr=1e-3, warmup_steps=0, step=1) == 1e-3
