"""Resident memory, as the kernel counts it, does not grow with the number of layers.

Twice the layers may take what each layer leaves in memory: the input of its block, and some 100 KiB
of modules, hooks, records and extents; and 2 MiB for the heap, whose holes differ from run to run.
Gradients of so many layers alone are four times as much. What an earlier session left to the
garbage collector, its arenas among it, is collected before anything is measured: else it goes at
some moment of the run, and its bytes are taken from the rise.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
WIDTH, TOKENS = 256, 2 * 16
LAYERS = 8
GRADIENT_BYTES = 2 * 12 * WIDTH * WIDTH
"""Of one layer."""
INPUT_BYTES = 2 * TOKENS * WIDTH
OBJECTS_BYTES = 100 << 10
HEAP_BYTES = 2 << 20

PROGRAM = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from parity.models import SmallGPT, loss_of
from parity.sessions import open_session, use_small_records

layers, width, device, budget, where = json.loads(sys.argv[1])
torch.set_num_threads(1)
options = {"device": device, "config": {"activations": {"checkpoint": "unit"}}}
if device == "emulated":
    options["device_memory"] = 2 << 21

def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

def train(name, layers):
    with open_session(Path(where) / name, budget_bytes=budget or 1 << 30, **options) as session:
        with session.building():
            model = SmallGPT(width=width, layers=layers).to(torch.bfloat16)
        model = session.wrap(model)
        smallest = session._wrapped.plan.smallest_bytes
        optimizer = session.AdamW(model.parameters())
        for index in range(3 if budget else 0):
            loss_of(model, index).backward()
            optimizer.step()
            optimizer.zero_grad()
        if budget:
            session.commit()
        return smallest, session.stats().host_peak_bytes

train("warm", 2)  # what every process takes once
gc.collect()  # its arenas
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = peak_bytes()
smallest, leased = train("run", layers)
print(json.dumps([smallest, leased, peak_bytes() - before]))
"""


def train(tmp_path: Path, layers: int, device: str, budget_bytes: int) -> list[int]:
    """Returns the smallest budget, the most bytes leased, and the rise of peak RSS."""
    where = tmp_path / f"{layers}-{budget_bytes}"
    arguments = json.dumps([layers, WIDTH, device, budget_bytes, str(where)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, arguments],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_twice_the_layers_take_no_more_resident_memory(tmp_path: Path, device: str) -> None:
    smallest, _, _ = train(tmp_path, 2 * LAYERS, device, 0)

    allowed = LAYERS * (INPUT_BYTES + OBJECTS_BYTES) + HEAP_BYTES
    (_, half_leased, half), (_, all_leased, whole) = (
        train(tmp_path, layers, device, smallest) for layers in (LAYERS, 2 * LAYERS)
    )

    assert half_leased == all_leased <= smallest
    assert half >= smallest // 2, "the rise of the peak is not measured"
    assert whole - half <= allowed < LAYERS * GRADIENT_BYTES / 4
