"""Measures a device: its link, what copies hide, a step's time, and that no bit depends on it.

    python benchmarks/gpu_check.py [--device cuda|emulated] [--small]

Prints a table as its parts end. Each is a process: CUDA that has failed in one does so until that
ends. Exit status 1 if a part failed, losses differ or the device's budget was exceeded, 77 if
there is no CUDA device. On `emulated` the rates say nothing of hardware: it shows that the
check works.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

import offload
from offload.devices import make_device
from offload.memory import Arena
from offload.runs.gpt import GPT, GPTShape
from offload.sizes import MIB, format_size

LINK, PLAIN, RESIDENT, STREAMED = PARTS = ("link", "plain", "resident", "streamed")
ROUNDS = 5
STEPS = 4
PART_S = 60.0
"""After this a part is given up."""
LABEL_WIDTH = 44


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes of a smoke run")
    parser.add_argument("--part", choices=PARTS, help="print what this part finds as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} finds none; nothing was measured")
        return 77
    if arguments.part is not None:
        print(json.dumps(measure(arguments.part, arguments.device, small=arguments.small)))
        return 0
    row("torch", torch.__version__)
    found = {name: run_part(name, sys.argv[1:]) for name in PARTS}
    return 0 if is_right(found) else 1


def row(label, value):
    print(f"{label:<{LABEL_WIDTH}}  {value}", flush=True)


def run_part(name, arguments):
    """Prints the rows of a part; returns what it found, None where it failed."""
    command = [sys.executable, __file__, *arguments, "--part", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PART_S, check=False)
    except subprocess.TimeoutExpired:
        row(name, f"FAILED: not done after {PART_S:.0f} s")
        return None
    if done.returncode != 0:
        row(name, f"FAILED: exit status {done.returncode}")
        print(done.stderr, file=sys.stderr, flush=True)
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    for label, value in found["rows"]:
        row(label, value)
    return found


def is_right(found):
    """Prints how the parts compare; returns whether all are there, equal bits and in budget."""
    plain, resident, streamed = (found[name] for name in (PLAIN, RESIDENT, STREAMED))
    claims = []
    if plain and resident:
        row("on the device over plain, passes", f"{resident['passes_s'] / plain['passes_s']:.3f}")
        row("on the device over plain, step", f"{resident['step_s'] / plain['step_s']:.3f}")
        # Updates round otherwise than torch's: docs/numerics.md.
        claims.append(("first loss equal to plain", resident["losses"][0] == plain["losses"][0]))
    if resident and streamed:
        row("streamed over on the device, step", f"{streamed['step_s'] / resident['step_s']:.3f}")
        is_equal = all(resident[each] == streamed[each] for each in ("losses", "digest"))
        claims.append(("losses and digest equal", is_equal))
    if streamed:
        claims.append(("within the device budget", streamed["peak"] <= streamed["budget"]))
    for label, is_true in claims:
        row(label, is_true)
    return all(found.values()) and all(is_true for _, is_true in claims)


def measure(part, kind, *, small):
    """Returns the rows of a part, and what others are compared with."""
    if kind == "cuda":  # attention's backward adds in any order else
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    if part == LINK:
        rows = link_rows(kind, (4 if small else 256) * MIB)
        return {"rows": [("device", name_of(kind)), *rows]}
    shape = GPTShape(
        layers=8,
        width=64 if small else 1024,
        heads=4 if small else 16,
        context=32 if small else 512,
        vocabulary=256,
    )
    if part == PLAIN:
        return timed("plain PyTorch", train_plain(kind, shape))
    if part == RESIDENT:
        return timed("all on the device", train(kind, shape, budget=None))
    largest = 2 * (12 * shape.width**2 + 13 * shape.width)
    whole = 2 * sum(p.numel() for p in meta_model(shape).parameters())
    budget = max(whole // 4, 2 * largest)
    found = timed(f"{whole / budget:.1f} x the device budget", train(kind, shape, budget=budget))
    found["rows"].append(
        ("device peak of budget", f"{format_size(found['peak'])} of {format_size(budget)}")
    )
    return {**found, "budget": budget}


def timed(what, found):
    found["rows"] = [
        (f"{what}, forward + backward", f"{found['passes_s'] * 1e3:.1f} ms"),
        (f"{what}, step", f"{found['step_s'] * 1e3:.1f} ms"),
    ]
    return found


def name_of(kind):
    return torch.cuda.get_device_name() if kind == "cuda" else kind


def synchronize(kind):
    if kind == "cuda":
        torch.cuda.synchronize()


def link_rows(kind, num_bytes):
    """Rates of registered copies each way, and how much of a copy computing hides."""
    device = make_device(kind)
    device.open()
    arena = Arena(num_bytes)
    arena.open()
    memory = arena.whole()
    device.register_host(memory)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    slot = device.tensor_over(device.allocate(len(memory)))

    def start_copy():
        device.note_uses([slot])
        return device.copy_in(memory, slot)

    start_copy().wait()
    side = 512 if kind == "emulated" else 4096
    matrix = torch.ones(side, side, device=device.torch_device)
    times = 1

    def copy_in():
        copy = start_copy()
        copy.wait()
        copy.synchronize()

    def copy_out():
        device.copy_out(slot, host).synchronize()

    def compute():
        for _ in range(times):
            torch.mm(matrix, matrix)
        synchronize(kind)

    def both():
        copy = start_copy()
        compute()
        copy.synchronize()

    compute()
    in_s, out_s = median_s(copy_in), median_s(copy_out)
    times = 1 + int(2 * in_s / median_s(compute))  # enough to hide a copy, and little more
    compute_s, both_s = median_s(compute), median_s(both)
    start_copy().wait()
    hidden = (in_s + compute_s - both_s) / min(in_s, compute_s)
    device.unregister_host(memory)
    device.close()
    return [
        ("host to device, registered", f"{num_bytes / in_s / 1e9:.1f} GB/s"),
        ("device to host, registered", f"{num_bytes / out_s / 1e9:.1f} GB/s"),
        ("overlap share of a copy and computing", f"{max(0.0, min(hidden, 1.0)):.2f}"),
    ]


def median_s(run):
    times = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def meta_model(shape):
    with torch.device("meta"):
        return GPT(shape)


def build(shape):
    torch.manual_seed(0)
    return GPT(shape)


def batches(shape, device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, 256, (4, shape.context + 1), generator=generator)
        yield tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def train_plain(kind, shape):
    """Returns the median times of passes and step, and the losses, without the engine."""
    device = torch.device("cuda" if kind == "cuda" else "cpu")
    model = build(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return time_steps(kind, model, optimizer, batches(shape, device))


def train(kind, shape, *, budget):
    """Trains with parameters in host memory; `budget` None: with all of them on the device."""
    options = {"offload": False} if budget is None else {
        "device_memory": budget,
        "host_memory": 1 << 40,
        "policy": {"parameters": "host", "optimizer": "host"},
    }  # fmt: skip
    model = build(shape)
    with offload.Session(device=kind, **options) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), lr=1e-3)
        found = time_steps(kind, model, optimizer, batches(shape, session.device))
        found["digest"] = session.state_digest()
        found["peak"] = session.stats().device_peak_bytes
    return found


def time_steps(kind, model, optimizer, inputs_and_targets):
    """Returns the median times of passes and step, the first left out, and the losses."""
    passes, steps, losses = [], [], []
    for inputs, targets in inputs_and_targets:
        synchronize(kind)
        started_s = time.perf_counter()
        loss = model(inputs, targets)
        loss.backward()
        synchronize(kind)
        passes.append(time.perf_counter() - started_s)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(kind)
        steps.append(time.perf_counter() - started_s)
        losses.append(loss.item())
    return {
        "passes_s": statistics.median(passes[1:]),
        "step_s": statistics.median(steps[1:]),
        "losses": losses,
    }


if __name__ == "__main__":
    sys.exit(main())
