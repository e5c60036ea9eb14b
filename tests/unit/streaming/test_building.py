import pytest
import torch
from parity.oracle import same_bits
from parity.sessions import open_session
from torch import nn

from offload.errors import BudgetError
from offload.streaming.building import Building, BuildingParameters, StoreSpill


class MemorySpill:
    """Keeps evicted parameters in a dict and counts them."""

    def __init__(self):
        self.kept = {}
        self.num_puts = 0

    def put(self, key, values):
        self.num_puts += 1
        self.kept[key] = values.clone()

    def take(self, key, into):
        into.copy_(self.kept.pop(key))

    def drop(self, key, *, num_bytes):
        assert self.kept.pop(key).nbytes == num_bytes


class Layered(nn.Module):
    """Initialised as libraries do: per layer, by `apply`, by name, tied."""

    def __init__(self, *, layers=6, width=24):
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width) for _ in range(layers)
        )
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.rand(3))
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
        with torch.no_grad():
            self.layers[0].linear1.weight.copy_(self.layers[1].linear1.weight * 2)

    def _initialise(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class Orthogonal(nn.Module):
    """Initialised by functions that read the whole weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)
            nn.init.trunc_normal_(layer.bias)
        self.register_buffer("positions", torch.arange(4))
        self.layers[3].register_parameter("bias", None)
        self.half().float()


def stack():
    """Layers that are deep copies of one, as torch stacks them."""
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


MODELS = [Layered, Orthogonal, stack, lambda: nn.LSTM(8, 8, num_layers=3)]


def largest_bytes(model):
    return max(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("factory", MODELS)
def test_values_and_random_state_are_those_of_a_plain_build(factory):
    torch.manual_seed(1)
    plain = factory()
    following = torch.rand(1)
    budget_bytes = 2 * largest_bytes(plain)  # the least for expressions of two parameters
    spill = MemorySpill()
    building = Building(budget_bytes=budget_bytes, spill=spill)

    torch.manual_seed(1)
    with building.active():
        built = factory()
    also_following = torch.rand(1)

    assert torch.equal(following, also_following)
    assert [n for n, _ in built.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for (name, parameter), expected in zip(
        built.named_parameters(), plain.parameters(), strict=True
    ):
        assert same_bits(parameter.detach().clone(), expected.detach()), name
    assert building.peak_bytes <= budget_bytes + largest_bytes(plain)
    held = {p for m in built.modules() for p in dict.values(m._parameters) if p is not None}
    assert sum(p.untyped_storage().nbytes() for p in held) <= building.peak_bytes + 4 * len(held)


@pytest.mark.parametrize("budget_bytes", [1, 1023, 1024, 4096, None])
def test_a_budget_of_any_size_builds_the_same_model(budget_bytes):
    torch.manual_seed(1)
    plain = Orthogonal()
    spill = MemorySpill()
    building = Building(budget_bytes=budget_bytes, spill=spill)

    torch.manual_seed(1)
    with building.active():
        built = Orthogonal()

    assert (spill.num_puts > 0) == (budget_bytes is not None)
    for (name, parameter), expected in zip(
        built.named_parameters(), plain.parameters(), strict=True
    ):
        assert same_bits(parameter.detach().clone(), expected.detach()), name


def test_room_for_another_owner_is_made_by_eviction_and_stays():
    spill = MemorySpill()
    building = Building(budget_bytes=8 * 1088, spill=spill)
    with building.active():
        built = Orthogonal()  # seven layers of 1088 bytes, one without its bias
    assert spill.num_puts == 0

    building.leave_room(4 * 1088)
    num_left = len(spill.kept)
    for parameter in built.parameters():
        building.touch(parameter)

    assert 4 * 1088 <= sum(p.nbytes for p in spill.kept.values()) <= 5 * 1088
    assert len(spill.kept) >= num_left > 0


def test_tied_parameters_stay_tied():
    building = Building(budget_bytes=16384, spill=MemorySpill())

    with building.active():
        built = Layered()

    assert built.head.weight is built.tokens.weight


def test_finish_gives_modules_their_plain_parameters_back():
    building = Building(budget_bytes=None, spill=None)
    with building.active():
        built = Layered()
    assert isinstance(built.head._parameters, BuildingParameters)

    building.finish()

    assert all(type(module._parameters) is dict for module in built.modules())


def test_finish_drops_what_no_model_has_any_more():
    spill = MemorySpill()
    building = Building(budget_bytes=1, spill=spill)
    with building.active():
        layer = nn.Linear(4, 4)
        layer.weight = nn.Linear(4, 4).weight
    for parameter in layer.parameters():
        building.touch(parameter)
        building.forget(parameter)

    building.finish()

    assert spill.kept == {}


def test_modules_made_outside_are_left_alone():
    original = nn.Module.__init__
    building = Building(budget_bytes=0, spill=None)

    with pytest.raises(BudgetError), building.active():
        Layered()

    assert nn.Module.__init__ is original
    assert type(nn.Linear(2, 2)._parameters) is dict


def test_a_build_that_needs_storage_and_has_none_is_refused_with_the_bytes():
    building = Building(budget_bytes=10_000, spill=None)

    with (
        pytest.raises(BudgetError, match=r"within 9.77 KiB.*no storage path"),
        building.active(),
    ):
        Layered()


def test_meta_parameters_pass():
    building = Building(budget_bytes=1, spill=None)

    with building.active(), torch.device("meta"):
        built = nn.Linear(1000, 1000)

    assert built.weight.is_meta


def test_a_model_built_within_a_session_is_wrapped_with_the_same_values(tmp_path, monkeypatch):
    # Twice the budget: no gradients, so that the smallest budget is below the parameters.
    torch.manual_seed(1)
    plain = Layered()
    budget_bytes = 64 << 10
    assert sum(p.numel() * 4 for p in plain.parameters()) > 1.8 * budget_bytes

    with open_session(tmp_path, budget_bytes=budget_bytes) as session:
        torch.manual_seed(1)
        with session.building():
            built = Layered()
        peak_bytes = session._building.peak_bytes
        evicted = set(session._building._spilled)
        taken = []
        take = StoreSpill.take
        monkeypatch.setattr(
            StoreSpill, "take", lambda self, key, into: (taken.append(key), take(self, key, into))
        )
        model = session.wrap(built, training=False)

        assert model.head.weight is model.tokens.weight
        assert peak_bytes <= budget_bytes + largest_bytes(plain)
        expected = plain.state_dict()
        for name, values in model.state_dict().items():
            assert same_bits(values, expected[name]), name
        assert not [r for r in session._store.records() if r.startswith("building/")]
        # Nothing reads the values but what moves them: each at most once.
        assert 0 < len(evicted) <= len(taken) <= len(list(plain.parameters()))
