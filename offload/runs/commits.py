"""What a run stores with each commit beside the state, and how it goes on from it."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import CorruptStateError
from offload.layout import ModelLayout
from offload.storage.opening import find_store


def commit_metadata(*, step: int) -> dict[str, Any]:
    """Returns what a resume after `step` steps needs: the step and torch's generator."""
    state = torch.get_rng_state().numpy().tobytes()
    return {"step": step, "torch_rng_state": base64.b64encode(state).decode("ascii")}


def committed_step(stores: Sequence[Path]) -> int | None:
    """Returns the steps of a run that its newest commit has; None if it is no run's.

    Raises:
        CorruptStateError: There are manifests and none is complete.
    """
    metadata = find_store(stores).manifest.head.get("metadata")
    step = metadata.get("step") if isinstance(metadata, Mapping) else None
    return step if isinstance(step, int) else None


def stored_layout(stores: Sequence[Path]) -> ModelLayout | None:
    """Returns how the model in a store is laid out; None if it is no model's.

    Raises:
        CorruptStateError: There are manifests and none is complete.
    """
    layout = find_store(stores).manifest.head.get("layout")
    return ModelLayout.from_json(layout) if isinstance(layout, dict) else None


def restore(metadata: Mapping[str, Any] | None) -> int:
    """Returns the steps that are done and sets torch's generator as it was after them.

    Args:
        metadata: Of the commit that was opened; None for a new run.

    Raises:
        CorruptStateError: The metadata is not that of a run.
    """
    if metadata is None:
        return 0
    try:
        step = int(metadata["step"])
        state = bytearray(base64.b64decode(metadata["torch_rng_state"], validate=True))
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptStateError(
            "cannot resume: expected the commit of a run with `step` and `torch_rng_state`, "
            f"found {type(error).__name__}: {error}; the store belongs to another program: "
            "name another directory"
        ) from error
    return step
