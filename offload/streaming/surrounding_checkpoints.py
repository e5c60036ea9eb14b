"""Whether a call lies within an activation checkpoint.

[Note: a checkpoint that computes again is on the Python stack]
The forward of a checkpoint calls what it wraps, and so does its backward, of both kinds, from a
function of torch's module. Of torch's stack of hooks only the top pair can be seen, which may be
somebody else's, and the reentrant kind pushes none.
"""

import sys
from types import FrameType

import torch.utils.checkpoint

_TORCH_S = vars(torch.utils.checkpoint)
_SEQUENTIAL = torch.utils.checkpoint.checkpoint_sequential.__name__


def is_in_checkpoint() -> bool:
    """Returns whether a checkpoint runs this call, or computes it again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # `checkpoint_sequential` only calls others, and leaves its last segment alone.
        if frame.f_globals is _TORCH_S and not frame.f_code.co_qualname.startswith(_SEQUENTIAL):
            return True
        frame = frame.f_back
    return False
