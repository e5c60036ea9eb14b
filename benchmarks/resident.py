"""What small models cost where everything is resident, beside plain PyTorch.

    python benchmarks/resident.py [--shapes NAME ...] [--pairs N] [--small] [--json]

One thread computes; a model and its plain copy take turns, and each pair gives a ratio of
processor times of the whole process: that of the median pair, and the least and the most.
`evaluation` is a forward without gradients of a model wrapped with `training=False`; `passes` a
forward and a backward that adds to gradients; `step` forward, backward, update and `zero_grad`,
against `torch.optim.AdamW(fused=True)`. Placements: `host` keeps parameters and state in host
memory and updates after backward, `forward` does so under the next forward, `slots` streams
parameters from storage into slots, one for each unit.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time

import torch
from torch import nn

import offload
from offload.runs.gpt import GPT, GPTShape

WARM_UPS = 3
PLACEMENTS = {
    "host": {"parameters": "host", "optimizer": "host", "overlap": "none"},
    "forward": {"parameters": "host", "optimizer": "host", "overlap": "forward"},
    "slots": {"parameters": "storage", "optimizer": "host", "overlap": "none"},
}
ACTIONS = ("evaluation", "passes", "step")


def gpt(width):
    shape = GPTShape(layers=4, width=width, heads=4, context=32, vocabulary=256)
    tokens = torch.randint(0, 256, (1, 33), generator=torch.Generator().manual_seed(1))
    return GPT(shape).bfloat16(), lambda model: model(tokens[:, :-1], tokens[:, 1:])


def mlp():
    layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(30)]
    inputs = torch.randn(1, 32).bfloat16()
    return nn.Sequential(*layers).bfloat16(), lambda model: model(inputs).float().square().mean()


def convolutional():
    channels = itertools.pairwise([3, 16, 16, 32, 32, 64])
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.GroupNorm(4, o), nn.ReLU())
        for i, o in channels
    ]
    images = torch.randn(1, 3, 8, 8)
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 64, 10))
    return model, lambda model: model(images).square().mean()


SHAPES = {
    "gpt-64": lambda: gpt(64),
    "gpt-256": lambda: gpt(256),
    "mlp": mlp,
    "convolutional": convolutional,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="one pair of one step: a smoke run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    pairs, repeats = (1, 1) if arguments.small else (arguments.pairs, 10)
    torch.set_num_threads(1)
    cases = itertools.product(arguments.shapes, PLACEMENTS, ACTIONS)
    found = [measure(*case, pairs=pairs, repeats=repeats) for case in cases]
    if arguments.json:
        print(json.dumps(found))
        return
    for row in found:
        print(
            f"{row['shape']:<14}{row['placement']:<8}{row['action']:<11}{row['plain_s'] * 1e3:8.3f}"
            f" ms, over plain {row['over_plain']:.3f} ({row['least']:.2f} to {row['most']:.2f})"
        )


def measure(shape, placement, action, *, pairs, repeats):
    """Returns the processor time of an action beside that of the plain model."""
    is_trained = action != "evaluation"
    plain, loss_of = build(shape)
    with tempfile.TemporaryDirectory() as directory:
        policy, store = PLACEMENTS[placement], f"{directory}/store"
        with offload.Session(host_memory="1GiB", store=store, policy=policy) as session:
            model, _ = build(shape)
            session.wrap(model, training=is_trained)
            optimizers = None, None
            if action == "step":
                fused = torch.optim.AdamW(plain.parameters(), fused=True)
                optimizers = fused, session.AdamW(model.parameters())
            sides = list(zip((plain, model), optimizers, strict=True))

            def spent_s(side):
                return process_s(*side, loss_of, is_trained=is_trained, repeats=repeats)

            for side in sides * WARM_UPS:
                spent_s(side)
            times = []
            for index in range(pairs):
                order = sides if index % 2 else sides[::-1]
                spent = [spent_s(side) for side in order]
                times.append(spent if index % 2 else spent[::-1])
    ratios = [ours_s / plain_s for plain_s, ours_s in times]
    return {
        "shape": shape,
        "placement": placement,
        "action": action,
        "plain_s": statistics.median(plain_s for plain_s, _ in times) / repeats,
        "over_plain": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def build(shape):
    torch.manual_seed(0)
    return SHAPES[shape]()


def process_s(model, optimizer, loss_of, *, is_trained, repeats):
    """Returns the processor time of so many passes or steps."""
    started_s = time.process_time()
    for _ in range(repeats):
        with torch.set_grad_enabled(is_trained):
            loss = loss_of(model)
        if is_trained:
            loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return time.process_time() - started_s


if __name__ == "__main__":
    main()
