"""Transforms of `torch.func`, forward derivatives, tracers: the right result or a clear error."""

import pytest
import torch
from parity.oracle import same_bits
from parity.sessions import open_session
from torch import func, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from offload.errors import BudgetError, StoreError

# torch scripts its own rules for forward derivatives, and warns of scripting.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

WIDTH = 32
UNIT_BYTES = 8 << 10
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


class Tower(nn.Module):
    """Layers of which the first is transformed as `inside` says."""

    def __init__(self, inside=None, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.inside = inside

    def forward(self, x):
        if self.inside is not None:
            x = self.inside(self.layers[0], x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build(inside=None):
    torch.manual_seed(0)
    return Tower(inside)


def values_of(model):
    return {name: values.detach().clone() for name, values in model.state_dict().items()}


def square(model):
    return lambda x: model(x).square().sum()


def of_values(model):
    return lambda values, x: func.functional_call(model, values, (x,)).square().sum()


def dual(model):
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X))))
        return found.primal, found.tangent


APART = {
    "functional_call": lambda m: func.functional_call(m, values_of(m), (X,)),
    "grad by values": lambda m: func.grad(of_values(m))(values_of(m), X),
    "per sample": lambda m: func.vmap(func.grad(of_values(m)), (None, 0))(values_of(m), X),
    "forward_ad": dual,
}
"""What needs no more than a slot, in which no parameter is kept."""
KEEPING = {
    "grad": lambda m: func.grad(square(m))(X),
    "vjp": lambda m: func.vjp(m, X)[1](torch.ones_like(X)),
    "jvp": lambda m: func.jvp(m, (X,), (torch.ones_like(X),)),
    "vmap": lambda m: func.vmap(m)(X),
    "jacfwd": lambda m: func.jacfwd(m)(X[0]),
    "hessian": lambda m: func.hessian(square(m))(X[0]),
}
"""What records parameters themselves, whose units then keep their slots."""
MEMORY = {"few": 3, "enough": 8}


def open_with(tmp_path, slots, device):
    options = {"device_memory": slots * UNIT_BYTES} if device == "emulated" else {}
    budget = 1 << 20 if device == "emulated" else (slots * UNIT_BYTES + 150_000)
    return open_session(tmp_path, budget_bytes=budget, overlap="none", device=device, **options)


def require_gradients(model, *, plain):
    for each in (model, plain):
        square(each)(X).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(found.grad.clone(), expected.grad)


@pytest.mark.parametrize("name", [*APART, *KEEPING])
def test_a_transform_gives_the_plain_result_or_names_what_is_kept(tmp_path, name, device):
    transform = {**APART, **KEEPING}[name]
    plain = build()
    with open_with(tmp_path, MEMORY["enough"], device) as session:
        model = session.wrap(build())
        session.AdamW(model.parameters())

        found = transform(model)

        assert all(map(same_bits, tree_leaves(found), tree_leaves(transform(plain))))
        del found
        require_gradients(model, plain=plain)


@pytest.mark.unified  # the smallest host budget of this model has slots for all
@pytest.mark.parametrize("name", KEEPING)
def test_a_transform_beyond_the_budget_is_refused_and_leaves_nothing(tmp_path, name):
    with open_with(tmp_path, 2, "emulated") as session:
        model = session.wrap(build())
        session.AdamW(model.parameters())

        with pytest.raises(BudgetError, match=r"whoever keeps `layers\.\d\.weight`"):
            KEEPING[name](model)

        require_gradients(model, plain=build())


INSIDE = {
    "vmap of a weight": lambda layer, x: func.vmap(lambda row: layer.weight @ row)(x),
    "vmap of a call": lambda layer, x: func.vmap(layer)(x),
    "jvp": lambda layer, x: func.jvp(layer, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_transform_inside_a_forward_trains_exactly(tmp_path, name, device):
    with open_with(tmp_path, MEMORY["few"], device) as session:
        model = session.wrap(build(INSIDE[name]))
        session.AdamW(model.parameters())

        require_gradients(model, plain=build(INSIDE[name]))


def test_a_gradient_by_a_transform_inside_a_forward_is_refused_by_torch(tmp_path, device):
    del device

    def inside(layer, x):
        return func.grad(square(layer))(x)

    with open_session(tmp_path) as session:
        model = session.wrap(build(inside))

        with pytest.raises(RuntimeError, match="support saved tensor hooks"):
            model(X)


@pytest.mark.parametrize("trace", [
    lambda m: torch.export.export(m, (X,)), lambda m: make_fx(m, tracing_mode="fake")(X),
    lambda m: make_fx(m)(X), lambda m: torch.jit.trace(m, (X,)),
], ids=["export", "make_fx of fake tensors", "make_fx", "jit"])  # fmt: skip
def test_a_tracer_is_refused_and_leaves_nothing(tmp_path, trace, device):
    del device
    with open_session(tmp_path) as session:
        model = session.wrap(build())
        session.AdamW(model.parameters())

        # `jit` takes every parameter before it calls: more than there are slots, on a device.
        clear = "trace a plain model with the values|whoever keeps"
        with pytest.raises((StoreError, BudgetError), match=clear):
            trace(model)

        require_gradients(model, plain=build())


def test_a_plain_model_with_the_values_is_exported(tmp_path, device):
    del device
    with open_session(tmp_path) as session:
        model = session.wrap(build())
        plain = Tower()
        plain.load_state_dict(model.state_dict())

        exported = torch.export.export(plain, (X,)).module()

        assert same_bits(exported(X), model(X))
