"""How much work a failure costs, and how often to commit so that it costs least."""

import math
from dataclasses import dataclass


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
