"""`p.grad` over an accumulator behaves as a plain gradient under everything users do with it."""

import copy
import io
import math
import pickle
from unittest import mock

import pytest
import torch
from parity.oracle import same_bits, sum_of_squares, to_fp32
from torch import nn

from offload.optim.gradient import Accumulator, StreamedGradient
from offload.optim.gradient_home import ResidentGradient
from offload.optim.norm import GradientNorm

U = torch.nn.utils
SHAPES = [(8, 4), (3,), (), (0,), (2, 2, 3)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def pair(dtype):
    """Returns parameters with streamed gradients, and the same with plain ones."""
    return make_pair(dtype)


def make_pair(dtype):
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    streamed = [nn.Parameter(p.detach().clone()) for p in plain]
    for index, (s, p) in enumerate(zip(streamed, plain, strict=True)):
        p.grad = torch.randn(p.shape).to(dtype)
        s.grad = StreamedGradient(
            Accumulator(f"p{index}", ResidentGradient(p.grad.clone()), sums_of_squares)
        )
    return streamed, plain


def sums_of_squares(gradients, scales):
    sums = []
    for gradient in gradients:
        values = gradient.to(torch.float32)
        for scale in scales:
            values = values * scale
        sums.append(sum_of_squares(values.numpy()))
    return sums


def require_equal(streamed, plain):
    for s, p in zip(streamed, plain, strict=True):
        assert (s.grad is None) == (p.grad is None)
        if s.grad is not None:
            assert same_bits(s.grad.clone(), p.grad)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


# Scalings: left pending, so their values differ from plain ones by one rounding at most. Where a
# factor is a power of two, or none is pending, nothing may differ.
EXACT = {
    "clip_grad_value_": lambda ps: U.clip_grad_value_(ps, 0.3),
    "clip_grad_value_ without foreach": lambda ps: U.clip_grad_value_(ps, 0.3, foreach=False),
    "clip_grad_value_ with foreach": lambda ps: U.clip_grad_value_(ps, 0.3, foreach=True),
    "clip by inf-norm": lambda ps: U.clip_grad_norm_(ps, 0.5, norm_type=float("inf")),
    "zero_": lambda ps: [p.grad.zero_() for p in ps],
    "zero_grad to zeros": lambda ps: sgd(ps).zero_grad(set_to_none=False),
    "zero_grad to None": lambda ps: sgd(ps).zero_grad(),
    "copy_": lambda ps: [p.grad.copy_(torch.ones(p.shape)) for p in ps],
    "fill_": lambda ps: [p.grad.fill_(3) for p in ps],
    "item assignment": lambda ps: ps[0].grad.__setitem__(0, 7),
    "mask assignment": lambda ps: ps[0].grad.__setitem__(ps[0].grad > 0, 0),
    "view and fill": lambda ps: [ps[0].grad.view(-1)[3:7].fill_(1)],
    "narrow and add": lambda ps: [ps[0].grad.view(-1).narrow(0, 0, 2).add_(1)],
    "transpose and mul": lambda ps: [ps[0].grad.t().mul_(2)],
    "add_": lambda ps: [p.grad.add_(1) for p in ps],
    "add_ itself": lambda ps: [p.grad.add_(p.grad) for p in ps],
    "mul_ by itself": lambda ps: [p.grad.mul_(p.grad) for p in ps],
    "mul_ by a tensor": lambda ps: [ps[0].grad.mul_(torch.arange(4))],
    "mul_ by 2": lambda ps: [p.grad.mul_(2) for p in ps],
    "div_ by 3": lambda ps: [p.grad.div_(3) for p in ps],
    "operator /=": lambda ps: setattr(ps[0], "grad", ps[0].grad / 3),
    "clamp_": lambda ps: [p.grad.clamp_(-0.1, 0.1) for p in ps],
    "nan_to_num_": lambda ps: [p.grad.nan_to_num_() for p in ps],
    "copy_ from itself": lambda ps: [p.grad.copy_(p.grad) for p in ps],
    "data": lambda ps: [p.grad.data.add_(1) for p in ps],
    "detach": lambda ps: [p.grad.detach().add_(1) for p in ps],
    "foreach add": lambda ps: torch._foreach_add_([p.grad for p in ps], 1.0),
    "foreach mul by 4": lambda ps: torch._foreach_mul_([p.grad for p in ps], 4.0),
    "foreach mul by tensors": lambda ps: torch._foreach_mul_(
        [p.grad for p in ps], [torch.tensor(0.5)] * len(ps)
    ),
    "foreach zero": lambda ps: torch._foreach_zero_([p.grad for p in ps]),
    "assigned product": lambda ps: [setattr(p, "grad", p.grad * 2) for p in ps],
    "assigned clone": lambda ps: [setattr(p, "grad", p.grad.clone()) for p in ps],
    "SGD": lambda ps: sgd(ps).step(),
    "SGD with foreach": lambda ps: torch.optim.SGD(ps, lr=0.5, foreach=True).step(),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.5).step(),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.5, fused=True).step(),
    "out of place": lambda ps: torch.where(ps[0].grad > 0, ps[0].grad, 0).sum(),
    "sum": lambda ps: ps[0].grad.sum(),
    "float": lambda ps: ps[0].grad.float().sum(),
    "isnan": lambda ps: ps[0].grad.isnan().any(),
    "1-norm": lambda ps: ps[0].grad.norm(1),
    "norm over a dimension": lambda ps: torch.linalg.vector_norm(ps[0].grad, dim=1).sum(),
    "total inf-norm": lambda ps: U.get_total_norm(
        [p.grad for p in ps if p.numel()], norm_type=float("inf")
    ),
    "parameters_to_vector": lambda ps: U.parameters_to_vector([p.grad for p in ps]),
    "cat": lambda ps: torch.cat([p.grad.flatten() for p in ps]),
    "tolist": lambda ps: torch.tensor(ps[1].grad.tolist()),
    "item": lambda ps: torch.tensor(ps[2].grad.item()),
}


@pytest.mark.parametrize("name", EXACT)
def test_an_operation_has_its_plain_effect(pair, name):
    streamed, plain = pair
    if name == "clip by inf-norm":  # torch refuses to take it of an empty gradient
        streamed, plain = streamed[:3], plain[:3]

    found, expected = EXACT[name](streamed), EXACT[name](plain)

    if isinstance(expected, torch.Tensor):
        assert same_bits(found, expected)
    require_equal(streamed, plain)
    for s, p in zip(streamed, plain, strict=True):
        assert same_bits(s, p)  # what an optimizer of torch's own made of it


@pytest.mark.parametrize("name", [n for n in EXACT if n not in ("operator /=", "SGD")])
def test_an_operation_has_its_plain_effect_on_a_scaled_gradient(pair, name):
    streamed, plain = pair
    if name == "clip by inf-norm":
        streamed, plain = streamed[:3], plain[:3]
    for s, p in zip(streamed, plain, strict=True):
        s.grad.mul_(0.3)  # stays pending
        p.grad.copy_((p.grad.float() * torch.tensor(0.3)).to(p.dtype))
    assert all(s.grad.accumulator.scales for s in streamed)

    found, expected = EXACT[name](streamed), EXACT[name](plain)

    if name.startswith(("mul_ by 2", "foreach mul by 4", "foreach mul by tensors", "clip by inf")):
        return  # another factor: both stay pending and the gradient is rounded once
    if isinstance(expected, torch.Tensor):
        assert same_bits(found, expected)
    require_equal(streamed, plain)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm_returns_n_and_leaves_the_factor_pending(pair, foreach, max_norm):
    streamed, plain = pair
    total = math.fsum(sum_of_squares(to_fp32(p.grad)) for p in plain)
    expected = torch.tensor(math.sqrt(total), dtype=torch.float64).float()
    factor = torch.clamp((1.0 / (expected + 1e-6)) * max_norm, max=1.0)

    found = U.clip_grad_norm_(streamed, max_norm, foreach=foreach)

    assert type(found) is torch.Tensor and found.dtype is torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=2**-23)  # sums may be ordered else
    scales = [s.grad.accumulator.scales for s in streamed]
    assert scales == [[factor.item()] if factor < 1 else []] * len(streamed)
    for s, p in zip(streamed, plain, strict=True):
        memory = s.grad.accumulator.memory
        assert same_bits(memory, p.grad), "the stored gradient is not rounded"


def test_the_norm_is_formed_in_the_order_of_names_and_blocks():
    # Sums that depend on the order: a large square before or after many small ones.
    torch.manual_seed(0)
    gradients = {name: torch.randn(5000) * 10.0**power for power, name in enumerate("dacb")}
    expected = 0.0
    for name in sorted(gradients):
        expected += sum_of_squares(gradients[name].numpy())
    streamed = []
    for name, gradient in gradients.items():
        parameter = nn.Parameter(torch.zeros(5000))
        parameter.grad = StreamedGradient(
            Accumulator(name, ResidentGradient(gradient), sums_of_squares)
        )
        streamed.append(parameter)

    found = U.get_total_norm([p.grad for p in streamed])
    backwards = U.get_total_norm([p.grad for p in reversed(streamed)])
    clipped = U.clip_grad_norm_(streamed, 1.0)

    assert found.item() == float(torch.tensor(math.sqrt(expected)).float())
    assert same_bits(found, backwards)
    assert same_bits(found, clipped)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_returned_and_may_be_refused(pair, value):
    streamed, _ = pair
    streamed[0].grad[0, 0] = value

    with pytest.raises(RuntimeError, match="non-finite"):
        U.clip_grad_norm_(streamed, 1.0, error_if_nonfinite=True)
    norm = U.clip_grad_norm_(streamed, 1.0)

    assert same_bits(norm, torch.tensor(value))
    expected = 0.0 if math.isinf(value) else math.nan
    (factor,) = streamed[1].grad.accumulator.scales
    assert factor == expected or (math.isnan(factor) and math.isnan(expected))


def test_clip_grads_with_norm_leaves_the_factor_pending(pair):
    streamed, _ = pair
    norm = torch.tensor(2.0)

    U.clip_grads_with_norm_(streamed, 0.5, norm)

    factor = ((1 / (norm + 1e-6)) * 0.5).item()
    assert [s.grad.accumulator.scales for s in streamed] == [[factor]] * len(streamed)


def test_a_norm_shows_as_a_plain_number(pair):
    streamed, plain = pair

    norm = streamed[0].grad.norm()

    assert isinstance(norm, GradientNorm)
    expected = math.sqrt(sum_of_squares(to_fp32(plain[0].grad)))
    assert norm.item() == pytest.approx(expected, rel=2**-23)
    assert float(norm + 1) == pytest.approx(expected + 1, rel=2**-22)
    assert f"{norm:.1f}" == f"{expected:.1f}"
    assert norm.tolist() == norm.numpy() == norm.item()
    assert repr(norm) == repr(norm.value)


class TestPendingFactors:
    def test_two_stay_pending_and_a_third_applies_them(self, pair):
        streamed, plain = pair
        gradient, reference = streamed[0].grad, plain[0].grad

        gradient.mul_(0.7).mul_(0.9)
        assert len(gradient.accumulator.scales) == 2
        gradient.mul_(0.3)

        once = (reference.float() * torch.tensor(0.7) * torch.tensor(0.9)).to(reference.dtype)
        assert same_bits(gradient.accumulator.memory, once)
        assert gradient.accumulator.scales == [torch.tensor(0.3).item()]

    def test_a_factor_of_exactly_1_is_none(self, pair):
        streamed, _ = pair

        streamed[0].grad.mul_(1.0).mul_(torch.tensor(1.0))

        assert streamed[0].grad.accumulator.scales == []

    def test_reading_rounds_once_and_keeps_them_pending(self, pair):
        streamed, plain = pair
        gradient, reference = streamed[0].grad, plain[0].grad
        gradient.mul_(0.7).mul_(0.9)

        values = gradient.clone()

        unrounded = reference.float() * torch.tensor(0.7) * torch.tensor(0.9)
        assert same_bits(values, unrounded.to(reference.dtype))
        assert len(gradient.accumulator.scales) == 2
        assert same_bits(gradient.accumulator.memory, reference)

    def test_writing_applies_them_first(self, pair):
        streamed, plain = pair
        gradient, reference = streamed[0].grad, plain[0].grad
        gradient.mul_(0.7)

        gradient[0] = 5

        expected = (reference.float() * torch.tensor(0.7)).to(reference.dtype)
        expected[0] = 5
        assert gradient.accumulator.scales == []
        assert same_bits(gradient.accumulator.memory, expected)

    @pytest.mark.parametrize("overwrite", [
        lambda g: g.zero_(),
        lambda g: g.copy_(torch.full(g.shape, 2.0)),
        lambda g: torch._foreach_zero_([g]),
    ])  # fmt: skip
    def test_overwriting_drops_them(self, dtype, overwrite):
        streamed, plain = make_pair(dtype)
        streamed[0].grad.mul_(math.nan)

        overwrite(streamed[0].grad)
        overwrite(plain[0].grad)

        assert same_bits(streamed[0].grad.clone(), plain[0].grad)

    def test_the_norm_is_that_of_the_scaled_unrounded_gradient(self, pair):
        streamed, plain = pair
        streamed[0].grad.mul_(0.7)

        norm = streamed[0].grad.norm()

        scaled = to_fp32(plain[0].grad) * torch.tensor(0.7).numpy()
        assert norm.item() == float(torch.tensor(math.sqrt(sum_of_squares(scaled))).float())


class TestGradScaler:
    def unscale(self, parameters, scale=4.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = sgd(parameters)
        scaler.scale(torch.tensor(1.0))
        scaler.unscale_(optimizer)
        return scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item()

    def test_unscale_leaves_the_inverse_pending(self, pair):
        streamed, plain = pair

        found = self.unscale(streamed), self.unscale(plain)

        assert found == (0.0, 0.0)
        assert [s.grad.accumulator.scales for s in streamed] == [[0.25]] * len(streamed)
        require_equal(streamed, plain)

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_unscale_finds_what_is_not_finite(self, pair, value):
        streamed, plain = pair
        streamed[1].grad[2] = value
        plain[1].grad[2] = value

        assert (self.unscale(streamed), self.unscale(plain)) == (1.0, 1.0)

    def test_unscale_then_clip_leaves_two_factors(self, pair):
        streamed, _ = pair

        self.unscale(streamed)
        U.clip_grad_norm_(streamed, 0.01)

        assert {len(s.grad.accumulator.scales) for s in streamed} == {2}

    def test_a_whole_step_of_the_scaler_equals_the_plain_one(self, pair):
        streamed, plain = pair
        for parameters in (streamed, plain):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            optimizer = sgd(parameters)
            scaler.scale(torch.tensor(1.0))
            scaler.step(optimizer)
            scaler.update()

        assert all(map(same_bits, streamed, plain))


class TestBackward:
    def test_a_second_backward_adds_into_the_accumulator(self, pair):
        streamed, plain = pair
        before = streamed[0].grad
        x = torch.randn(5, 4).to(before.dtype)

        for parameters in (streamed, plain):
            nn.functional.linear(x, parameters[0]).square().sum().backward()

        assert streamed[0].grad is before
        require_equal(streamed, plain)

    def test_a_second_backward_applies_a_pending_factor_first(self, pair):
        streamed, plain = pair
        streamed[0].grad.mul_(0.5)
        plain[0].grad.mul_(0.5)

        for parameters in (streamed, plain):
            (parameters[0] * 3).sum().backward()

        require_equal(streamed, plain)


class TestCopies:
    def test_a_deep_copy_is_plain_and_independent(self, pair):
        streamed, plain = pair
        streamed[0].grad.mul_(0.5)
        plain[0].grad.mul_(0.5)

        duplicate = copy.deepcopy(streamed[0].grad)
        streamed[0].grad.zero_()

        assert type(duplicate) is torch.Tensor
        assert same_bits(duplicate, plain[0].grad)

    def test_a_pickle_is_plain(self, pair):
        streamed, plain = pair

        duplicate = pickle.loads(pickle.dumps(streamed[0].grad))

        assert type(duplicate) is torch.Tensor
        assert same_bits(duplicate, plain[0].grad)

    def test_torch_save_is_plain(self, pair):
        streamed, plain = pair
        file = io.BytesIO()

        torch.save({"gradient": streamed[0].grad}, file)
        file.seek(0)

        assert same_bits(torch.load(file)["gradient"], plain[0].grad)

    def test_numpy_shows_the_values_themselves(self):
        streamed, plain = make_pair(torch.float32)
        streamed[0].grad.mul_(0.5)

        array = streamed[0].grad.numpy()
        array[0, 0] = 9
        expected = (plain[0].grad * 0.5).clone()
        expected[0, 0] = 9

        assert same_bits(streamed[0].grad.clone(), expected)

    def test_it_looks_like_a_tensor(self, pair):
        streamed, plain = pair
        for s, p in zip(streamed, plain, strict=True):
            assert isinstance(s.grad, torch.Tensor)
            assert (s.grad.shape, s.grad.dtype, s.grad.device) == (
                p.grad.shape,
                p.grad.dtype,
                p.grad.device,
            )
            assert s.grad.stride() == p.grad.stride() and s.grad.is_contiguous()
            assert repr(s.grad) == f"StreamedGradient({p.grad!r})"


class TestAccumulator:
    def test_start_copies_and_drops_what_was_pending(self):
        accumulator = Accumulator("p", ResidentGradient(torch.zeros(3)), sums_of_squares)
        accumulator.multiply(0.5)
        gradient = torch.ones(3)

        accumulator.start(gradient)
        gradient.zero_()

        assert accumulator.scales == []
        assert accumulator.memory.tolist() == [1, 1, 1]

    def test_a_sparse_gradient_is_made_dense(self):
        accumulator = Accumulator("p", ResidentGradient(torch.zeros(4, 2)), sums_of_squares)
        weight = nn.Parameter(torch.zeros(4, 2))
        nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True).sum().backward()
        assert weight.grad.is_sparse

        accumulator.start(weight.grad)

        assert accumulator.memory.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]

    def test_an_alias_on_a_device_waits_for_updates_that_read_the_memory(self):
        changed = []
        home = ResidentGradient(torch.zeros(3))
        accumulator = Accumulator(
            "p", home, sums_of_squares, changed.append, device=torch.device("meta")
        )

        StreamedGradient(accumulator).view(3, 1)

        assert changed == ["p"]


def test_a_norm_that_is_moved_to_a_device_keeps_its_sums(pair):
    streamed, _ = pair

    norm = streamed[0].grad.norm().to("meta")  # as `clip_grad_norm_` does on a GPU

    assert isinstance(norm, GradientNorm)
    assert norm.sums


def test_a_copy_whose_wait_is_interrupted_is_waited_for_again():
    memory = torch.zeros(3)
    accumulator = Accumulator("p", ResidentGradient(memory), sums_of_squares)
    copy = mock.Mock()
    copy.synchronize.side_effect = [KeyboardInterrupt, None]
    accumulator.start(torch.ones(3), start_copy=lambda *_: copy)

    with pytest.raises(KeyboardInterrupt):
        accumulator.read()
    accumulator.read()

    assert copy.synchronize.call_count == 2
