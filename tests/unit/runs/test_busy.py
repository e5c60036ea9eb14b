"""What others took of the cores while something was measured."""

import pytest

from offload.runs.busy import CpuTime, busy_note, others_cpu_share, parse_cpu_time

# user nice system idle iowait irq softirq steal guest guest_nice
_STAT = """cpu  900 90 90 900 90 90 90 90 0 0
cpu0 100 10 20 500 30 4 5 6 0 0
cpu1 200 0 40 700 0 0 0 0 0 0
cpu11 5000 0 0 0 0 0 0 0 0 0
intr 12345
"""


def test_counts_are_those_of_the_cores_of_the_process() -> None:
    both = parse_cpu_time(_STAT, cores={0, 1}, ticks_per_s=100, own_s=1.5)
    second = parse_cpu_time(_STAT, cores={1}, ticks_per_s=100, own_s=1.5)

    assert both == CpuTime(all_s=16.15, work_s=3.76, own_s=1.5)
    assert second == CpuTime(all_s=9.4, work_s=2.4, own_s=1.5)


def test_a_text_without_these_cores_says_nothing() -> None:
    assert parse_cpu_time("", cores={0}, ticks_per_s=100, own_s=0.0) is None
    assert parse_cpu_time(_STAT, cores={7}, ticks_per_s=100, own_s=0.0) is None


def test_the_share_of_others_is_what_this_process_did_not_take() -> None:
    before = CpuTime(all_s=100.0, work_s=40.0, own_s=10.0)
    after = CpuTime(all_s=120.0, work_s=55.0, own_s=20.0)

    assert others_cpu_share(before, after) == pytest.approx(0.25)


def test_a_share_is_neither_negative_nor_told_of_too_short_a_span() -> None:
    before = CpuTime(all_s=100.0, work_s=40.0, own_s=10.0)

    # Ticks are samples: they may show less work than the process knows of itself.
    assert others_cpu_share(before, CpuTime(all_s=102.0, work_s=41.0, own_s=11.1)) == 0.0
    assert others_cpu_share(before, CpuTime(all_s=100.1, work_s=40.1, own_s=10.0)) is None
    assert others_cpu_share(None, before) is None
    assert others_cpu_share(before, None) is None


def test_now_counts_the_work_of_this_process() -> None:
    before = CpuTime.now()
    sum(range(1_000_000))
    after = CpuTime.now()

    assert before is not None
    assert after is not None
    assert after.own_s > before.own_s
    assert after.all_s >= before.all_s


def test_a_note_is_given_of_a_busy_machine_only() -> None:
    assert busy_note(None) is None
    assert busy_note(0.05) is None
    assert "took 37% of the CPU time" in (busy_note(0.37) or "")
