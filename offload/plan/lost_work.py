"""How much work a failure costs, and how often to commit so that it costs least."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offload.plan.host import HostPlan
from offload.plan.machine_profile import PathProfile
from offload.plan.traffic import ModelBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWork:
    """What a run loses by commits and failures; times in seconds."""

    commit_s: float
    """Time that training stands still for one commit."""
    recovery_s: float
    """Time from a restart to its first step."""
    mean_time_between_failures_s: float

    def expected_s(self, interval_s: float) -> float:
        """Returns the work that a failure costs on average, with commits every `interval_s`."""
        return self.commit_s + interval_s / 2 + self.recovery_s

    @property
    def best_interval_s(self) -> float:
        """The time between commits at which commits and lost work together cost least.

        Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
        dumps", FGCS 22 (2006), equation 37; its first term is Young's sqrt(2 * commit * failures).
        """
        failures_s, commit_s = self.mean_time_between_failures_s, self.commit_s
        if commit_s >= 2 * failures_s:
            return failures_s
        ratio = commit_s / (2 * failures_s)
        young_s = math.sqrt(2 * commit_s * failures_s)
        return max(young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - commit_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitForecast:
    """What commits of a run cost, before it has made one.

    Transfers only: syncs, and the start of the process at a recovery, come on top.
    """

    commit_bytes: int
    """What a commit writes: records kept in memory and resident parameters."""
    resident_bytes: int
    """What a recovery reads before the first step."""
    paths: tuple[PathProfile, ...]
    """All of the run's; empty where one of them was not measured."""
    intervals: tuple[float | int, ...]
    """Between commits, and between checkpoints: seconds, or steps where it is an `int`; 0: none."""
    mean_time_between_failures_s: float

    def lost_work(self) -> LostWork | None:
        """Returns the times; None where the paths' rates are not known."""
        if not self.paths:
            return None
        return LostWork(
            commit_s=self.commit_bytes / sum(path.write_bytes_per_s for path in self.paths),
            recovery_s=self.resident_bytes / sum(path.read_bytes_per_s for path in self.paths),
            mean_time_between_failures_s=self.mean_time_between_failures_s,
        )

    def to_json(self, *, step_s: float | None) -> dict[str, float | int | None]:
        """Returns the figures under the names that a run's result has for them."""
        lost = self.lost_work()
        best_s = lost.best_interval_s if lost else None
        interval_s = shortest_interval_s(self.intervals, step_s)
        return {
            "commit_bytes": self.commit_bytes,
            "commit_s": lost.commit_s if lost else None,
            "recovery_s": lost.recovery_s if lost else None,
            "expected_lost_work_s": lost.expected_s(interval_s) if lost and interval_s else None,
            "best_commit_interval_s": best_s,
            "best_commit_every": max(1, round(best_s / step_s)) if best_s and step_s else None,
        }


def shortest_interval_s(intervals: Iterable[float | int], step_s: float | None) -> float | None:
    """Returns the time between two commits of any kind; None: there are none, or it is not known.

    Args:
        intervals: Of each kind: seconds, or steps where it is an `int`; 0: none but at the end.
        step_s: Of a step, where it is known.
    """
    given = [each for each in intervals if each]
    if not given or (not step_s and any(isinstance(each, int) for each in given)):
        return None
    return min(each * (step_s or 0.0) if isinstance(each, int) else each for each in given)


def committed_bytes(model: ModelBytes, host: HostPlan) -> int:
    """Returns what a commit writes at most: all that lives in memory and that steps change."""
    cached = host.num_cached * host.state_buffer_bytes
    resident_state = model.state_bytes if host.resident_state_bytes else 0
    resident_parameters = model.trainable_parameter_bytes if host.resident_parameter_bytes else 0
    return min(cached, model.state_bytes) + resident_state + resident_parameters


def measured_on_all(profiles: Sequence[PathProfile | None]) -> tuple[PathProfile, ...]:
    """Returns the profiles, or none where one is missing."""
    known = tuple(profile for profile in profiles if profile is not None)
    return known if len(known) == len(profiles) else ()
