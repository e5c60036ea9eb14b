"""What a commit says of the model and its optimizer, beside the blocks of the store."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import StoreError
from offload.layout import ModelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHead:
    """The head of a manifest.

    Attributes:
        step: Completed optimizer steps.
        layout: Of the model.
        steps: Updates that each trainable parameter has had, by name.
        metadata: What `commit` was given.
    """

    step: int
    layout: ModelLayout
    steps: dict[str, int]
    metadata: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; `from_json` gives an equal head."""
        return {
            "step": self.step,
            "layout": self.layout.to_json(),
            "steps": self.steps,
            "metadata": self.metadata,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any] | None) -> "CommitHead":
        """Returns the head that a store gives.

        Raises:
            StoreError: It is not that of a model's store.
        """
        try:
            if value is None:
                raise KeyError("step")
            return CommitHead(
                step=int(value["step"]),
                layout=ModelLayout.from_json(value["layout"]),
                steps={str(name): int(step) for name, step in value["steps"].items()},
                metadata=dict(value["metadata"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(
                "cannot read the head of a commit: expected `step`, `layout`, `steps` and "
                f"`metadata` of a model, found {type(error).__name__}: {error}; the store belongs "
                "to another program or version: name another"
            ) from error
