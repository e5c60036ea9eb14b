"""The script that builds and runs the C tests says when it did not."""

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "test_c"


def test_a_mode_that_is_unknown_is_no_success():
    command = [SCRIPT, "--mode", "palin", "test_aio_control"]
    ended = subprocess.run(command, capture_output=True, check=False)

    assert ended.returncode in (2, 77)  # 77 where there is no compiler
