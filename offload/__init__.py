"""Trains PyTorch models that are larger than memory, exactly, from a tiered store.

Everything here is loaded on first use, so that importing `offload`, or a pure subpackage of it,
imports no torch.
"""

from typing import TYPE_CHECKING, Any

from offload.errors import (
    BudgetError,
    ConfigError,
    CorruptStateError,
    ModelError,
    OffloadError,
    PlanError,
    StorageError,
    StoreError,
)

if TYPE_CHECKING:
    from offload import testing
    from offload.optimizers import SGD, Adagrad, Adam, AdamW, Lion
    from offload.session import Session

    __version__: str

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BudgetError",
    "ConfigError",
    "CorruptStateError",
    "Lion",
    "ModelError",
    "OffloadError",
    "PlanError",
    "Session",
    "StorageError",
    "StoreError",
    "__version__",
    "testing",
]

_OPTIMIZERS = ("SGD", "Adagrad", "Adam", "AdamW", "Lion")
_LAZY = {"Session": "offload.session"} | dict.fromkeys(_OPTIMIZERS, "offload.optimizers")


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("offload")
    elif name == "testing":
        value = importlib.import_module("offload.testing")
    elif name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module `offload` has no attribute `{name}`")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
