"""What fio moved, as rates of a path."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from fio_rates import equal_rate
print(eval(sys.argv[2]))
"""


def evaluated(expression):
    command = [sys.executable, "-c", SCRIPT, str(BENCHMARKS), expression]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("both", "alone", "found"),
    [
        ((100.0, 100.0), (150.0, 120.0), 100.0),
        # In a second 200 in and 100 out; the 100 that are behind take half a second more.
        ((200.0, 100.0), (300.0, 200.0), 200 / 1.5),
        ((100.0, 200.0), (400.0, 300.0), 200 / 1.25),
        # Nothing of one direction: one after the other, as on a half duplex drive.
        ((300.0, 0.0), (300.0, 150.0), 100.0),
    ],
)
def test_the_direction_that_was_behind_catches_up_alone(both, alone, found):
    done = evaluated(f"equal_rate({both}, {alone})")

    assert float(done.stdout) == pytest.approx(found)
