"""What fio moved both ways, as a rate of equal bytes in and out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from fio_rates import equal_rate
both, alone = json.loads(sys.argv[2])
print(equal_rate(both, alone))
"""


def equal_rate(both, alone):
    command = [sys.executable, "-c", SCRIPT, str(BENCHMARKS), json.dumps([both, alone])]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


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
    assert equal_rate(both, alone) == pytest.approx(found)
