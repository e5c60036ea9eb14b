"""The update phase beside two baselines of ours, on two throttled paths. Needs root.

    python benchmarks/update_baselines.py [--parameters 1e8] [--steps 3] [--rounds 5] DIRECTORY

Makes file systems in DIRECTORY, measures engine, `deepspeed-like` and `mlp-like` one after the
other in each round, prints one JSON object and takes everything down again. The paths give 400 and
200 MB/s, reads and writes each; then the second drops to 100 MB/s. The engine finds a fifth of its
state in memory; `mlp-like` caches as many bytes. `deepspeed-like` uses the first path only.

Exit code 1 if a ratio is missed.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from throttled_paths import machine_of, throttled
from update_bound import memory_for

from offload.bench.update import bench_update
from offload.bench.update_options import UpdateOptions

CACHED = 0.2
SYSTEMS = ("engine", "deepspeed-like", "mlp-like")
GOALS = {
    "400_200": {"deepspeed-like": 2.2, "mlp-like": 1.15},
    "400_100": {"mlp-like": 1.4},
}


def measure(paths, arguments, system):
    parameters = int(arguments.parameters)
    return bench_update(
        UpdateOptions(
            parameters=parameters,
            paths=[path.mount for path in paths],
            host_memory_bytes=memory_for(parameters, CACHED),
            order="alternating" if system != "deepspeed-like" else "sequential",
            baseline=system,
            steps=arguments.steps,
            machine=machine_of(paths),
        )
    )


def rounds(paths, arguments, systems):
    """Runs the systems one after the other in each round."""
    reports = {system: [] for system in systems}
    for _ in range(arguments.rounds):
        for system in systems:
            reports[system].append(measure(paths, arguments, system))
    engine = reports["engine"]
    found = {}
    for system, each in reports.items():
        ratios = [b.update_s / e.update_s for b, e in zip(each, engine, strict=True)]
        times = [report.update_s for report in each]
        found[system] = {
            "update_s": round(statistics.median(times), 3),
            "spread": round(max(times) / min(times), 3),
            "read_bytes_per_step": each[-1].read_bytes_per_step,
            "write_bytes_per_step": each[-1].write_bytes_per_step,
            "cache_hit_rate": round(each[-1].cache_hit_rate, 3),
            "over_engine": round(statistics.median(ratios), 3),
            "state_digest": each[-1].state_digest,
        }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="Of all rates.")
    arguments = parser.parse_args()
    scale = arguments.scale
    size_bytes = int(arguments.parameters * 17) + (300 << 20)
    result = {"parameters": int(arguments.parameters), "rounds": arguments.rounds, "scale": scale}
    rates = (400 * scale, 200 * scale)
    with throttled(arguments.directory.absolute(), rates, size_bytes=size_bytes) as paths:
        result["400_200"] = rounds(paths, arguments, SYSTEMS)
        paths[1].set_rate(100 * scale)
        result["400_100"] = rounds(paths, arguments, ("engine", "mlp-like"))
    result["reached"] = {
        f"{name} {system}": result[name][system]["over_engine"] >= goal
        for name, goals in GOALS.items()
        for system, goal in goals.items()
    }
    json.dump(result, sys.stdout, indent=2)
    print()
    return 0 if all(result["reached"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
