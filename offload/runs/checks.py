"""The single checks of `offload doctor` and their report."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was looked at, what was found, and what to do where that is not right."""

    name: str
    status: Status
    found: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """All checks, in the order in which they were made."""

    checks: list[Check]

    @property
    def ok(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Returns the object of `offload doctor --json`."""
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}


def guarded(name: str, check: Callable[[], Check], *, remedy: str) -> Check:
    """Returns what `check` finds; that it can't be made is a failed check, not an error."""
    try:
        return check()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        return Check(name=name, status="fail", found=found, remedy=remedy)
