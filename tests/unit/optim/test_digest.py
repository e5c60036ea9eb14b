"""`state_digest` against a computation written here from its definition."""

import struct

import numpy as np
import pytest
import torch
import xxhash
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import require_equal_gradients, require_equal_state, train_both
from torch import nn

CODES = {torch.bfloat16: b"BF16", torch.float32: b"F32", torch.int8: b"I8"}


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Keeps torch's threads from waiting for those of other tests' processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fresh_digest(model, *, completed_steps=0):
    """Returns the digest of a model that was never updated: master = parameter, state zero."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    digest = xxhash.xxh3_128()
    for name, parameter in sorted((min(n), p) for p, n in names.items()):
        values = parameter.detach().contiguous()
        digest.update(name.encode("utf-8") + b"\0")
        digest.update(CODES[values.dtype] + b"\0")
        digest.update(struct.pack("<I", values.dim()))
        for size in values.shape:
            digest.update(struct.pack("<Q", size))
        digest.update(values.view(-1).view(torch.uint8).numpy().tobytes())
        if parameter.requires_grad:
            zeros = np.zeros(values.numel(), dtype=np.float32).tobytes()
            digest.update(struct.pack("<Q", 0))
            digest.update(values.float().view(-1).numpy().tobytes())
            digest.update(b"exp_avg\0" + zeros)
            digest.update(b"exp_avg_sq\0" + zeros)
    digest.update(struct.pack("<Q", completed_steps))
    return digest.hexdigest()


class Various(nn.Module):
    """Names out of order, empty and scalar parameters, frozen ones, integers, several dtypes."""

    def __init__(self):
        super().__init__()
        self.z = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.Z = nn.Linear(3, 3)
        self.é = nn.Parameter(torch.randn(7))
        self.scalar = nn.Parameter(torch.tensor(-0.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.randn(5, dtype=torch.bfloat16), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(9, dtype=torch.int8), requires_grad=False)
        self.alias = self.z
        self.strided = nn.Parameter(torch.randn(6, 4).t())
        self.register_buffer("ignored", torch.randn(3))


@pytest.mark.parametrize("codec", ["split", "fp32"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_a_model_that_was_never_updated(tmp_path, placement, codec):
    torch.manual_seed(0)
    expected = fresh_digest(Various())

    with open_session(tmp_path, placement, codec=codec) as session:
        torch.manual_seed(0)
        session.wrap(Various())

        assert session.state_digest() == expected
        assert session.state_digest() == expected, "taking it changes nothing"


def test_a_model_in_memory_and_one_without_parameters(tmp_path):
    with open_session(tmp_path, offload=False) as session:
        torch.manual_seed(0)
        session.wrap(Various())
        torch.manual_seed(0)
        assert session.state_digest() == fresh_digest(Various())

    with open_session(tmp_path) as session:
        session.wrap(nn.ReLU())
        assert session.state_digest() == xxhash.xxh3_128(struct.pack("<Q", 0)).hexdigest()


def test_a_step_without_gradients_changes_only_the_count(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        session.AdamW(model.parameters()).step()

        assert session.state_digest() == fresh_digest(build(SmallGPT), completed_steps=1)


def test_equal_states_give_equal_digests_however_they_are_stored(tmp_path, monkeypatch):
    use_small_records(monkeypatch)

    def digest_of(placement, **options):
        with open_session(tmp_path / str(options), placement, **options) as session:
            model = session.wrap(build(SmallGPT))
            optimizer = session.AdamW(model.parameters(), lr=0.01)
            for index in range(2):
                loss_of(model, index).backward()
                optimizer.step()
                optimizer.zero_grad()
            return session.state_digest()

    digests = {
        digest_of(placement, codec=codec) for placement in PLACEMENTS for codec in ("split", "fp32")
    }
    digests.add(digest_of(PLACEMENTS[0], offload=False))

    assert len(digests) == 1


@pytest.mark.parametrize("placement", [("host", "host"), ("storage", "storage")], ids="-".join)
def test_any_change_of_a_parameter_changes_it(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        before = session.state_digest()

        with torch.no_grad():
            model.norm.bias[3] = -0.0

        assert session.state_digest() != before


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_taking_it_leaves_units_that_are_prefetched_or_in_use(tmp_path, monkeypatch, placement):
    # Small records, large units: slots take more memory than the window.
    use_small_records(monkeypatch)
    reference = Reference(build(SmallGPT, width=128, layers=2))

    with open_session(tmp_path, placement, budget_bytes=16 << 20) as session:
        model = session.wrap(build(SmallGPT, width=128, layers=2))
        optimizer = session.AdamW(model.parameters())
        session.state_digest()
        train_both(model, optimizer, reference, steps=2)  # the update prefetches
        assert session.state_digest() == reference.digest()

        losses = [loss_of(m, 5) for m in (model, reference.model)]
        assert session.state_digest() == reference.digest()
        for loss in losses:
            loss.backward()  # leaves units in slots
        assert session.state_digest() == reference.digest()

        require_equal_gradients(model, reference)
        train_both(model, optimizer, reference, steps=2)
        require_equal_state(session, model, reference)


def test_taking_it_leaves_a_view_that_the_user_keeps(tmp_path, monkeypatch):
    use_small_records(monkeypatch)
    with open_session(tmp_path, budget_bytes=16 << 20) as session:
        model = session.wrap(build(SmallGPT, width=128, layers=2))
        kept = [block.up.weight.detach() for block in model.blocks]
        values = [view.clone() for view in kept]

        session.state_digest()

        assert all(map(same_bits, kept, values))


def test_frozen_shards_larger_than_the_window_are_read_through_a_slot(tmp_path, monkeypatch):
    use_small_records(monkeypatch)

    def make():
        model = build(SmallGPT, width=128, layers=3)
        model.blocks.requires_grad_(False)
        model.tokens.requires_grad_(False)
        model.head.requires_grad_(False)
        return model

    reference = Reference(make())
    with open_session(tmp_path, ("storage", "host"), budget_bytes=4 << 20) as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.norm.parameters())
        train_both(model, optimizer, reference, steps=2)

        plan = session._wrapped.plan
        assert plan.buffer_bytes < 4096 * 2  # below a frozen subgroup
        assert session.state_digest() == reference.digest()
        train_both(model, optimizer, reference, steps=2)
        require_equal_state(session, model, reference)
