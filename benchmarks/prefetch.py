"""Prefetch hits, stalls, and what streaming costs where everything is resident.

    python benchmarks/prefetch.py [--small] [--json]

On the emulated device, parameters in host memory, a link that carries a unit in a third of the time
for which a unit computes: hits and stalled share of forward and backward from the second step on,
with a third of the model's slots. Then, interleaved, steps of the plain model under
`torch.optim.AdamW(fused=True)` and of a wrapped one with everything resident: forward and backward
alone, and whole steps, the wrapped one with the update after backward.
"""

import argparse
import json
import statistics
import time

import torch

import offload
from offload.runs.gpt import GPT, GPTShape

STEPS = 6
ROUNDS = 22


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes of a smoke run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shape = GPTShape(
        layers=4 if arguments.small else 12,
        width=64 if arguments.small else 512,
        heads=4,
        context=32 if arguments.small else 256,
        vocabulary=256,
    )
    found = {**streamed(shape), **resident(shape)}
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<24} {value:.4g}")


def build(shape):
    torch.manual_seed(0)
    return GPT(shape)


def batch(shape, index):
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, 256, (4, shape.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def passes_s(model, shape, index):
    """Returns the time of one forward and backward."""
    started_s = time.perf_counter()
    model(*batch(shape, index)).backward()
    return time.perf_counter() - started_s


def streamed(shape):
    """Hits and stalls on a link that is fast enough."""
    plain = build(shape)
    plain_s = min(passes_s(plain, shape, index) for index in range(3))
    unit_bytes = 2 * (12 * shape.width**2 + 13 * shape.width)
    unit_s = plain_s / shape.layers / 3  # forward, the shorter pass
    slots = max(shape.layers // 3, 3)
    link = {"link_rate": int(3 * unit_bytes / unit_s)}
    policy = {"parameters": "host", "optimizer": "host", "prefetch": 2, "overlap": "none"}
    model, hits, accesses, stall_s, total_s = build(shape), 0, 0, 0.0, 0.0
    with offload.Session(
        {"tiers": {"device": link}},
        device="emulated",
        device_memory=slots * (unit_bytes + 8192),
        host_memory=1 << 40,
        policy=policy,
    ) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            before = session.stats()
            duration_s = passes_s(model, shape, step)
            after = session.stats()
            optimizer.step()
            optimizer.zero_grad()
            if step:
                hits += after.prefetch_hits - before.prefetch_hits
                accesses += after.accesses - before.accesses
                stall_s += after.io_wait_s - before.io_wait_s
                total_s += duration_s
    return {
        "slots": slots,
        "link_bytes_per_s": link["link_rate"],
        "accesses_per_step": accesses / (STEPS - 1),
        "prefetch_hit_rate": hits / max(accesses, 1),
        "stall_share": stall_s / total_s,
    }


def resident(shape):
    """Steps with all on the unified device, over those of the plain model."""
    plain, model = build(shape), build(shape)
    passes, steps = [], []
    policy = {"parameters": "host", "optimizer": "host", "overlap": "none"}
    with offload.Session(host_memory=1 << 40, policy=policy) as session:
        session.wrap(model)
        sides = (
            (plain, torch.optim.AdamW(plain.parameters(), fused=True)),
            (model, session.AdamW(model.parameters())),
        )
        for index in range(ROUNDS):
            order = sides if index % 2 else sides[::-1]
            times = {each: step_s(each, optimizer, shape, index) for each, optimizer in order}
            passes.append(times[model][0] / times[plain][0])
            steps.append(times[model][1] / times[plain][1])
    return {
        "resident_over_plain": statistics.median(steps[2:]),
        "resident_passes_over_plain": statistics.median(passes[2:]),
        "resident_spread": max(steps[2:]) / min(steps[2:]),
    }


def step_s(model, optimizer, shape, index):
    """Returns the times of forward and backward, and of the whole step."""
    started_s = time.perf_counter()
    duration_s = passes_s(model, shape, index)
    optimizer.step()
    optimizer.zero_grad()
    return duration_s, time.perf_counter() - started_s


if __name__ == "__main__":
    main()
