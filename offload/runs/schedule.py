"""The learning rate of each step."""


def learning_rate(*, lr: float, warmup_steps: int, step: int) -> float:
    """Returns the rate at `step` (from 1): a linear rise over `warmup_steps`, then `lr`."""
    if warmup_steps <= 0:
        return lr
    return lr * min(1.0, step / warmup_steps)
