"""What a commit says of the model and its optimizer, beside the blocks of the store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        buffers: Name, dtype, shape and offset of each buffer in the record of buffers.
        models: Of the session's models with a name; their records begin with it.
        torch_threads: That torch had at the commit; None where it does not say.
    """

    step: int
    layout: ModelLayout
    steps: dict[str, int]
    metadata: dict[str, Any]
    buffers: list[dict[str, Any]] = field(default_factory=list)
    models: dict[str, "CommitHead"] = field(default_factory=dict)
    torch_threads: int | None = None

    def layouts(self) -> list[ModelLayout]:
        """Returns the layouts of all models."""
        return [self.layout, *(head.layout for head in self.models.values())]

    def of(self, name: str) -> "CommitHead | None":
        """Returns the head of the model called `name`; of an empty name this one."""
        return self.models.get(name) if name else self

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; `from_json` gives an equal head."""
        values: dict[str, Any] = {
            "step": self.step,
            "layout": self.layout.to_json(),
            "steps": self.steps,
            "metadata": self.metadata,
            "buffers": self.buffers,
        }
        if self.models:
            values["models"] = {name: head.to_json() for name, head in self.models.items()}
        if self.torch_threads is not None:
            values["torch_threads"] = self.torch_threads
        return values

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
                buffers=[dict(fact) for fact in value["buffers"]],
                models={
                    str(name): CommitHead.from_json(head)
                    for name, head in value.get("models", {}).items()
                },
                torch_threads=_count_or_none(value.get("torch_threads")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(
                "cannot read the head of a commit: expected `step`, `layout`, `steps` and "
                f"`metadata` of a model, found {type(error).__name__}: {error}; the store belongs "
                "to another program or version: name another"
            ) from error


def _count_or_none(value: Any) -> int | None:
    return None if value is None else int(value)
