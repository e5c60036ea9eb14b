"""Measures a device: its link, what copies hide, a step's time, and that no bit depends on it.

    python benchmarks/gpu_check.py [--device cuda|emulated] [--small]

Prints a table; exit status 1 if losses differ or the device's budget was exceeded, 77 if there is
no CUDA device. On `emulated` the rates say nothing of hardware: it shows that the check works.
"""

import argparse
import os
import statistics
import sys
import time

import torch
from torch import nn

import offload
from offload.devices import make_device
from offload.memory import Arena
from offload.runs.gpt import GPT, GPTShape
from offload.sizes import MIB, format_size

ROUNDS = 5
STEPS = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes of a smoke run")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} finds none; nothing was measured")
        return 77
    if arguments.device == "cuda":  # attention's backward adds in any order else
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    rows, is_right = measure(arguments.device, small=arguments.small)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0 if is_right else 1


def measure(kind, *, small):
    """Returns the rows of the table, and whether bits and budget are right."""
    rows = [("device", name_of(kind)), ("torch", torch.__version__)]
    rows += link_rows(kind, (4 if small else 256) * MIB)
    shape = GPTShape(
        layers=8,
        width=64 if small else 1024,
        heads=4 if small else 16,
        context=32 if small else 512,
        vocabulary=256,
    )
    plain_s, _ = train_plain(kind, shape)
    resident = train(kind, shape, budget=None)
    largest = 2 * (12 * shape.width**2 + 13 * shape.width)
    whole = 2 * sum(p.numel() for p in meta_model(shape).parameters())
    budget = max(whole // 4, 2 * largest)
    streamed = train(kind, shape, budget=budget)
    is_equal = resident.losses == streamed.losses and resident.digest == streamed.digest
    peak = streamed.device_peak_bytes
    is_within = peak <= budget
    rows += [
        ("plain PyTorch, forward + backward", f"{plain_s * 1e3:.1f} ms"),
        ("all on the device, forward + backward", f"{resident.passes_s * 1e3:.1f} ms"),
        ("  over plain", f"{resident.passes_s / plain_s:.3f}"),
        ("all on the device, step", f"{resident.step_s * 1e3:.1f} ms"),
        (f"{whole / budget:.1f} x the device budget, step", f"{streamed.step_s * 1e3:.1f} ms"),
        ("  over all on the device", f"{streamed.step_s / resident.step_s:.3f}"),
        ("device peak of budget", f"{format_size(peak)} of {format_size(budget)}"),
        ("losses and digest equal", str(is_equal)),
    ]  # fmt: skip
    return rows, is_equal and is_within


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
    side = 512 if kind == "emulated" else 8192
    matrix = torch.ones(side, side, device=device.torch_device)

    def copy_in():
        copy = start_copy()
        copy.wait()
        copy.synchronize()

    def copy_out():
        device.copy_out(slot, host).synchronize()

    def compute():
        for _ in range(8):
            torch.mm(matrix, matrix)
        synchronize(kind)

    def both():
        copy = start_copy()
        compute()
        copy.synchronize()

    compute()
    in_s, out_s = median_s(copy_in), median_s(copy_out)
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
    """Returns the median time of forward and backward, and the losses, without the engine."""
    device = torch.device("cuda" if kind == "cuda" else "cpu")
    model = build(shape).to(device)
    times, losses = [], []
    for inputs, targets in batches(shape, device):
        synchronize(kind)
        started_s = time.perf_counter()
        loss = model(inputs, targets)
        loss.backward()
        synchronize(kind)
        times.append(time.perf_counter() - started_s)
        losses.append(loss.item())
        model.zero_grad()
    return statistics.median(times[1:]), losses


class Trained:
    """What a session gave."""


def train(kind, shape, *, budget):
    """Trains with parameters in host memory; `budget` None: with all of them on the device."""
    found = Trained()
    options = {"offload": False} if budget is None else {
        "device_memory": budget,
        "host_memory": 1 << 40,
        "policy": {"parameters": "host", "optimizer": "host"},
    }  # fmt: skip
    model, passes, steps, found.losses = build(shape), [], [], []
    with offload.Session(device=kind, **options) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), lr=1e-3)
        for inputs, targets in batches(shape, session.device):
            synchronize(kind)
            started_s = time.perf_counter()
            loss = model(inputs, targets)
            loss.backward()
            synchronize(kind)
            passes.append(time.perf_counter() - started_s)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - started_s)
            found.losses.append(loss.item())
        found.digest = session.state_digest()
        found.device_peak_bytes = session.stats().device_peak_bytes
    found.passes_s = statistics.median(passes[1:])
    found.step_s = statistics.median(steps[1:])
    return found


if __name__ == "__main__":
    sys.exit(main())
