"""How busy other processes kept the cores of this one while something was measured."""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_LEAST_SPAN_S = 0.5
"""CPU time is counted in ticks of 10 ms: over a shorter span the share says nothing."""
_BUSY_SHARE = 0.1
"""Of the cores: what daemons take of an idle machine is below 0.03."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """CPU time up to a moment of the cores that this process may run on, in seconds."""

    all_s: float
    """Of all these cores, idle or not."""
    work_s: float
    """What processes and the kernel for them took, and what a hypervisor gave to other guests."""
    own_s: float
    """Of this process, all its threads."""

    @staticmethod
    def now() -> "CpuTime | None":
        """Returns the counts of now; None where the kernel does not tell."""
        try:
            text = _STAT.read_text()
        except OSError:
            return None
        return parse_cpu_time(
            text,
            cores=os.sched_getaffinity(0),
            ticks_per_s=os.sysconf("SC_CLK_TCK"),
            own_s=time.process_time(),
        )


def parse_cpu_time(
    stat: str, *, cores: Collection[int], ticks_per_s: int, own_s: float
) -> CpuTime | None:
    """Returns what a text like that of `/proc/stat` says; None where it names none of `cores`.

    Interrupts are no work here: transfers of this process cause them.

    Args:
        stat: Lines `cpuN user nice system idle iowait irq softirq steal …`, in ticks.
        cores: Numbers of the cores that count.
        ticks_per_s: Of the counts in `stat`.
        own_s: CPU time of this process.

    Source: proc_stat(5).
    """
    names = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in stat.splitlines())
    counts = [
        [int(each) for each in words[1:9]] for words in lines if words[:1] and words[0] in names
    ]
    if not counts:
        return None
    work = sum(user + nice + system + steal for user, nice, system, _, _, _, _, steal in counts)
    return CpuTime(
        all_s=sum(map(sum, counts)) / ticks_per_s, work_s=work / ticks_per_s, own_s=own_s
    )


def others_cpu_share(before: CpuTime | None, after: CpuTime | None) -> float | None:
    """Returns the share of the cores' time, 0 to 1, that others took between two moments.

    None where it is not known, or the time between is too short to tell.
    """
    if before is None or after is None:
        return None
    all_s = after.all_s - before.all_s
    if all_s < _LEAST_SPAN_S:
        return None
    others_s = (after.work_s - before.work_s) - (after.own_s - before.own_s)
    return min(max(others_s / all_s, 0.0), 1.0)


def busy_note(share: float | None) -> str | None:
    """Returns what a reader of times must know of the machine; None where it was free enough."""
    if share is None or share < _BUSY_SHARE:
        return None
    return (
        f"other processes took {share:.0%} of the CPU time of this process's cores meanwhile: its "
        "times are those of a busy machine, and a free one may be faster"
    )
