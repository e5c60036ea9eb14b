"""What `torch.nn.utils` makes of a module's parameters, before and after it is wrapped."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_gradients, require_equal_state, train_both
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

from offload.errors import StoreError


def up(model):
    return model.blocks[1].up


def skip_initialisation(model):
    layer = utils.skip_init(nn.Linear, 32, 128)
    nn.init.constant_(layer.weight, 0.01)
    nn.init.zeros_(layer.bias)
    model.blocks[1].up = layer


def prune_for_good(model):
    prune.l1_unstructured(up(model), "weight", 0.3)
    prune.remove(up(model), "weight")


REWRITES = {
    "weight_norm": lambda m: parametrizations.weight_norm(up(m)),
    "spectral_norm": lambda m: parametrizations.spectral_norm(up(m)),
    "orthogonal": lambda m: parametrizations.orthogonal(m.blocks[1].attention.out),
    "spectral_norm by hooks": lambda m: utils.spectral_norm(up(m)),
    "prune": lambda m: prune.l1_unstructured(up(m), "weight", 0.3),
    "prune for good": prune_for_good,
    "skip_init": skip_initialisation,
}


def make(rewrite=None):
    model = build(SmallGPT, dtype=torch.float32)
    torch.manual_seed(3)
    if rewrite is not None:
        rewrite(model)
    return model


@pytest.fixture
def both(tmp_path):
    """Yields a session, its model, and the reference."""
    reference = Reference(make(), **OPTIONS)
    with open_session(tmp_path, budget_bytes=800_000) as session:
        yield session, session.wrap(make()), reference


OFTEN = {"weight_norm", "prune"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.slow) for n in REWRITES]
)
def test_a_module_that_was_rewritten_trains_exactly(tmp_path, name):
    reference = Reference(make(REWRITES[name]), **OPTIONS)

    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(make(REWRITES[name]))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, max_norm=0.05)

        require_equal_state(session, model, reference)


def test_a_wrapped_module_is_pruned(both):
    _, model, reference = both

    for m in (model, reference.model):
        prune.l1_unstructured(up(m), "weight", 0.3)
        loss_of(m, 0).backward()

    assert (up(model).weight == 0).any()
    require_equal_gradients(model, reference)


def test_a_wrapped_layer_is_fused_with_its_norm(both):
    _, model, reference = both
    norm = nn.BatchNorm1d(128).eval()
    norm.running_mean.fill_(0.5)

    found, expected = (
        utils.fuse_linear_bn_eval(up(m).eval(), norm) for m in (model, reference.model)
    )

    assert same_bits(found.weight, expected.weight)
    assert same_bits(found.bias, expected.bias)


def test_the_vector_of_all_parameters_is_that_of_the_state_dict(both):
    _, model, reference = both

    found = utils.parameters_to_vector(model.state_dict().values())

    assert same_bits(found, utils.parameters_to_vector(reference.model.parameters()).detach())
    # What is not in memory does not look like values: docs/streaming.md.
    assert utils.parameters_to_vector(model.parameters()).isnan().any()


def test_a_vector_written_to_absent_parameters_is_refused_not_lost(both):
    _, model, reference = both
    vector = utils.parameters_to_vector(reference.model.parameters()).detach()

    utils.vector_to_parameters(vector * 0.5, model.parameters())

    with pytest.raises(StoreError, match="edit it as an attribute of its module"):
        loss_of(model, 0)


def test_pruning_made_permanent_after_wrapping_is_refused_not_lost(tmp_path):
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(make(REWRITES["prune"]))
        prune.remove(up(model), "weight")

        with pytest.raises(StoreError, match="instead of replacing `parameter.data`"):
            session.state_digest()
