"""A short campaign of kills; `make torture` runs the long one."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from torture import Torture

SMALL = Path(__file__).parents[2] / "examples" / "small.toml"


@pytest.mark.slow
@pytest.mark.alone
def test_killed_runs_show_the_reference_again(tmp_path):
    overrides = ["train.steps=15", "data.source=files", f'data.files=["{argparse.__file__}"]']
    with Torture(tmp_path, config=SMALL, overrides=overrides, seed=1) as torture:
        torture.run(2)

    with Torture(tmp_path, config=SMALL, overrides=overrides, seed=2) as again:
        again.run(4)

    assert again.campaign.kills >= 4
    assert again.campaign.inside_a_commit * 2 >= again.campaign.kills
    assert again.campaign.steps_compared >= 15
