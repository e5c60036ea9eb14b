"""Version counters of saved tensors: what was changed in place must not be used in backward."""

import torch


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without memory that shares the version counter."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def modified_message(what: str, *, found: int, expected: int) -> str:
    """Returns torch's own message."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what} is at version {found}; expected version {expected} instead"
    )
