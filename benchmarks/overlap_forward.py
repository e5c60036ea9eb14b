"""A real model whose passes take as long as its update: overlap `forward` against `none`.

    python benchmarks/overlap_forward.py [--steps 8] [--layers 6] [--width 512] DIRECTORY

The rate of the path is limited so that the update alone takes as long as forward and backward,
whatever the machine; that limit, with the measured copy and update rates, gives the bounds. Prints
one JSON object: medians of each overlap, the ratio of each step to its bound, and whether all
losses are equal bit for bit.
"""

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from termination import exits_on_sigterm

from offload.config import build_config
from offload.plan.machine import Machine, PathRates
from offload.runs import train as runs
from offload.runs.train import run_training

MIB = 1 << 20


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--micro-steps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parameters", choices=("host", "storage"), default="host")
    arguments = parser.parse_args()
    with exits_on_sigterm():
        found = compare(arguments)
    json.dump(found, sys.stdout, indent=2)
    print()


def compare(arguments):
    in_memory = train(arguments, offload=False)
    passes_s = in_memory["forward_s"] + in_memory["backward_s"]
    unlimited = train(arguments, overlap="none", steps=3)
    moved = sum(unlimited[f"{way}_bytes_per_step"] for way in ("read", "write"))
    # Both directions share the limit: the update then takes as long as the passes do.
    rate = moved / passes_s
    found = {"none": [], "forward": []}
    for _ in range(arguments.rounds):
        for overlap, results in found.items():
            results.append(train(arguments, overlap=overlap, rate=rate))
    every = [result for results in found.values() for result in results]
    return {
        "parameters": in_memory["parameters"],
        "passes_s": passes_s,
        "path_bytes_per_s": rate,
        "losses_are_equal": all(r["losses"] == in_memory["losses"] for r in every),
        "digests_are_equal": all(r["state_digest"] == in_memory["state_digest"] for r in every),
        **{overlap: summary(results) for overlap, results in found.items()},
        "speed_up": statistics.median(r["step_s"] for r in found["none"])
        / statistics.median(r["step_s"] for r in found["forward"]),
    }


def summary(results):
    keys = ("step_s", "forward_s", "backward_s", "update_s", "io_wait_s", "bound_s")
    medians = {key: statistics.median(r[key] for r in results) for key in keys}
    ratios = [result["step_s"] / result["bound_s"] for result in results]
    return medians | {
        "step_over_bound": statistics.median(ratios),
        "spread": max(ratios) / min(ratios),
        "stalls": results[-1]["stalls"][:4],
    }


def train(arguments, *, overlap="none", rate=None, offload=True, steps=None):
    """Returns the result of a run on a path of `rate` bytes/s, both ways together."""
    root = Path(tempfile.mkdtemp(dir=arguments.directory))
    # The engine never moves more than the limit: with it the path is what the bound says.
    original = runs.probe_run
    if rate is not None:
        runs.probe_run = lambda *args: limited(original(*args), rate)
    try:
        result = run_training(configured(arguments, root, overlap, rate, offload, steps))
        if result.stopped_by is not None:  # a shortened run says nothing, and no other follows
            sys.exit(128 + signal.Signals[result.stopped_by])
    finally:
        runs.probe_run = original
        shutil.rmtree(root, ignore_errors=True)
    return result.to_json()


def limited(machine, rate):
    """Returns the machine as the limit leaves it: half duplex, each byte at `rate`."""
    return Machine(
        paths=tuple(
            PathRates(
                path=path.path,
                read_bytes_per_s=min(path.read_bytes_per_s, rate),
                write_bytes_per_s=min(path.write_bytes_per_s, rate),
                mixed_bytes_per_s=min(path.mixed_bytes_per_s, rate / 2),
            )
            for path in machine.paths
        ),
        copy_bytes_per_s=machine.copy_bytes_per_s,
        update_parameters_per_s=machine.update_parameters_per_s,
    )


def configured(arguments, root, overlap, rate, offload, steps):
    parameters = 12 * arguments.layers * arguments.width**2
    # Parameters and gradients, or gradients and slots; the window and a few records, but never room
    # for all of the state, 10 bytes a parameter: then nothing would move.
    budget = (4.5 if arguments.parameters == "host" else 3.5) * parameters
    budget += min(100 * MIB, 5 * parameters)
    return build_config(
        {
            "offload": offload,
            "model": {
                "layers": arguments.layers,
                "width": arguments.width,
                "heads": 8,
                "context": arguments.context,
            },
            "train": {
                "steps": steps or arguments.steps,
                "batch": arguments.batch,
                "micro_steps": arguments.micro_steps,
                "max_grad_norm": 1.0,
            },
            "optimizer": {"lr": 1e-3},
            "tiers": {
                "host": {"memory": int(budget)},
                "storage": {
                    "paths": [str(root)],
                    "durability": "none",
                    **({"rate_limit": [round(rate)]} if rate else {}),
                },
            },
            "policy": {
                "parameters": arguments.parameters,
                "optimizer": "storage",
                "order": "resident",
                "overlap": overlap,
            },
        }
    )


if __name__ == "__main__":
    main()
