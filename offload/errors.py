"""The exceptions of `offload`.

OffloadError
├── ConfigError        the caller's configuration or argument is wrong (also ValueError)
├── PlanError          what was asked does not fit this machine or its budgets (also ValueError)
├── BudgetError        a tier's budget has no room for a lease (also MemoryError)
├── StorageError       a transfer or a file operation failed (also OSError)
├── StoreError         the store is not in the state that the call needs (also RuntimeError)
├── ModelError         the user's model raised an exception, which is its cause (also RuntimeError)
└── CorruptStateError  stored bytes differ from what was written (also OSError)

Each message says what failed on which object, what was expected, what was found and what to do.
"""


class OffloadError(Exception):
    """Base class of every error that `offload` raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """A configuration key, value or argument is wrong."""


class PlanError(OffloadError, ValueError):
    """The plan does not fit the machine or the budgets; nothing was written."""


class BudgetError(OffloadError, MemoryError):
    """A tier's budget has no room for what was asked."""


class StorageError(OffloadError, OSError):
    """A transfer or a file operation failed; `errno` is set where the system gave one."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.errno = errno

    def __str__(self) -> str:
        return self.message


class StoreError(OffloadError, RuntimeError):
    """The store is not in the state that the call needs.

    `is_refusal` where it was not taken at all: another owns it, or something else is there.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class ModelError(OffloadError, RuntimeError):
    """The user's model, or what makes it, raised an exception in a run; that is its cause."""


class CorruptStateError(OffloadError, OSError):
    """Stored bytes differ from what was written."""
