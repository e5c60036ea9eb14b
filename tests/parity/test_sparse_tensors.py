"""Tensors that are no array: sparse buffers, inputs and weights that are made sparse."""

import argparse

import pytest
import torch
from parity.models import build
from parity.oracle import Reference
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn

import offload
from offload.config import build_config
from offload.runs.spilled import spilled_bytes


class OverGraph(nn.Module):
    """Layers over the edges of a graph, which are sparse, and one whose weight is."""

    def __init__(self, *, persistent=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.values = nn.Parameter(torch.ones(6))
        edges = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 0, 1]])
        self.register_buffer("places", edges, persistent=False)
        self.register_buffer("edges", torch.eye(4).to_sparse(), persistent=persistent)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(torch.sparse.mm(self.edges, layer(x)))
        weights = torch.sparse_coo_tensor(self.places, self.values, (4, 4), check_invariants=False)
        return torch.sparse.mm(weights, x)


def loss_of(model, index):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
    return model(x).square().mean()


@pytest.mark.parametrize(
    "activations",
    [{}, {"offload": "storage", "threshold": 64, "memory": "64KiB"}],
    ids=["kept", "moved"],
)
def test_sparse_tensors_that_autograd_saves_are_left_alone(tmp_path, activations):
    reference = Reference(build(OverGraph, dtype=None), **OPTIONS)

    with open_session(tmp_path, config={"activations": activations}) as session:
        model = session.wrap(build(OverGraph, dtype=None))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=loss_of)

        require_equal_state(session, model, reference)
        session.commit()


def test_a_sparse_buffer_that_commits_would_have_to_store_is_refused_before_training(tmp_path):
    with open_session(tmp_path) as session:
        model = build(OverGraph, persistent=True)

        with pytest.raises(offload.ConfigError, match="`edges`.*sparse_coo.*persistent=False"):
            session.wrap(model)


@pytest.mark.unified
@pytest.mark.parametrize("offloaded", ["none", "storage"])
def test_a_configured_run_counts_and_moves_what_is_beside_them(
    tmp_path, monkeypatch, train, offloaded
):
    monkeypatch.chdir(tmp_path)
    run = {
        "model": {"factory": "parity.factories:OverGraph", "width": 64, "depth": 3},
        "data": {"source": "files", "files": [argparse.__file__]},
        "train": {"steps": 2, "batch": 1},
        "tiers": {"host": {"memory": "96MiB"}},
        "activations": {"offload": offloaded, "checkpoint": "unit"},
    }

    found = [
        train(build_config({**run, **changes}), run_dir=tmp_path / name)
        for name, changes in {"stored": {}, "memory": {"offload": False}}.items()
    ]

    assert found[0].state_digest == found[1].state_digest
    assert found[0].activation_peak_bytes > 0
    assert (spilled_bytes(build_config(run)) > 0) == (offloaded == "storage")
