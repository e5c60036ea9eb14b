"""Casts of streamed weights that autograd saves are made again in backward, with the same bits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from parity.models import CheckpointedModel, SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_gradients, require_equal_state, train_both
from torch import nn
from torch.nn import functional

from offload.runs.activations import ActivationMeter

WIDTH = 8


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


class Tower(nn.Module):
    """Linear layers whose weights dwarf what else a pass keeps."""

    def __init__(self, *, width=128, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class ManyCasts(nn.Module):
    """Casts in every form that a graph saves them in, of weights in memory of every order."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3)
        self.last = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.cube = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        x = self.last(torch.tanh(self.conv(x)))
        ordered = self.last.weight.to(x.dtype, memory_format=torch.channels_last)
        x = x + functional.conv2d(x, ordered, padding=1) * self.scalar.to(x.dtype)
        x = x.flatten(2).permute(2, 0, 1)
        x, _ = self.gru(x)
        part = self.matrix[: WIDTH // 2].to(x.dtype)
        halves = self.matrix.to(x.dtype).view(2, WIDTH // 2, WIDTH)
        x = torch.einsum("tbi,kij,kjl->tbl", x, self.cube, self.cube.transpose(1, 2))
        x = torch.cat([x @ part.t(), x @ halves[1].t()], -1)
        return x * self.scale.double().to(x.dtype).expand(x.shape)


class Copied(nn.Module):
    """Copies of weights that keep their dtype, and lie behind others in their slot."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            scale, weight = (p.to(torch.float32, copy=True) for p in (block.bias, block.weight))
            x = torch.tanh(block(x)) @ weight.t() * scale
        return x


class Reused(nn.Module):
    """A weight used three times in a unit, and a unit used twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            for _ in range(3):
                x = torch.tanh(block(x))
        return x


def under_autocast(run, *, dtype=torch.bfloat16, **options):
    def loss(model, index):
        with torch.autocast("cpu", dtype=dtype, **options):
            return run(model, index)

    return loss


def image_loss(model, index):
    generator = torch.Generator().manual_seed(index)
    return model(torch.randn(2, 3, 6, 6, generator=generator)).float().square().mean()


def vector_loss(model, index):
    generator = torch.Generator().manual_seed(index)
    return model(torch.randn(3, WIDTH, generator=generator)).float().square().mean()


def nested_loss(model, index):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = loss_of(model, index)
        with torch.autocast("cpu", enabled=False):
            full = loss_of(model, index)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return low + full + loss_of(model, index)


CASES = {
    "many forms": (ManyCasts, image_loss),
    "without autocast": (ManyCasts, None),
    "copies": (Copied, vector_loss),
    "used often": (Reused, under_autocast(vector_loss)),
    "without its cache": (Reused, under_autocast(vector_loss, cache_enabled=False)),
    "fp16": (SmallGPT, under_autocast(loss_of, dtype=torch.float16)),
    "nested": (SmallGPT, nested_loss),
}


@pytest.mark.parametrize("case", CASES)
def test_casts_made_again_change_no_bit(tmp_path, case):
    factory, loss = CASES[case]
    if factory is ManyCasts:
        loss = under_autocast(image_loss, enabled=loss is not None)
    reference = Reference(build(factory, dtype=torch.float32), **OPTIONS)
    with open_session(tmp_path, budget_bytes=1 << 20) as session:
        model = session.wrap(build(factory, dtype=torch.float32))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, micro_steps=2, loss_of=loss)

        require_equal_state(session, model, reference)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, nested
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", ["each", "segments", "nested", "inside"])
@pytest.mark.parametrize("tie", [None, "functional"])
def test_casts_inside_activation_checkpoints_change_no_bit(tmp_path, form, reentrant, tie):
    def make():
        options = {"form": form, "reentrant": reentrant, "tie": tie}
        return build(CheckpointedModel, dtype=torch.float32, **options)

    reference = Reference(make(), **OPTIONS)
    with open_session(tmp_path, budget_bytes=1 << 20, prefetch=0) as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, loss_of=under_autocast(loss_of))

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("dtype, copies", [(torch.float32, 1), (torch.bfloat16, 0)])
def test_a_graph_keeps_no_copy_of_a_weight(tmp_path, dtype, copies):
    def peak(model):
        meter = ActivationMeter()
        x = torch.ones(1, 128, dtype=dtype, requires_grad=True)
        with meter.counting(without=model.parameters()):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).sum()
            loss.backward()
        return meter.peak_bytes

    plain = build(Tower, dtype=dtype)
    cast_bytes = 2 * sum(layer.weight.numel() for layer in plain.layers)
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        streamed = session.wrap(build(Tower, dtype=dtype))

        found, kept = peak(streamed), peak(plain)

        assert kept >= copies * cast_bytes
        assert found < cast_bytes / 20
        require_equal_gradients(streamed, Reference(plain))


def test_an_edit_between_a_cast_and_backward_is_refused(tmp_path):
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(Tower, dtype=torch.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(1, 128)).sum()
        with torch.no_grad():
            model.layers[3].weight.mul_(2)

        with pytest.raises(RuntimeError, match=r"inplace operation: parameter `layers.3.weight`"):
            loss.backward()


def test_a_step_between_a_cast_and_backward_is_refused(tmp_path):
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(Tower, dtype=torch.float32))
        optimizer = session.AdamW(model.parameters())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(1, 128)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()

        with pytest.raises(RuntimeError, match="modified by an inplace operation: parameter"):
            loss.backward()


def test_a_cast_of_earlier_values_that_autocast_still_has_is_refused(tmp_path):
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(Tower, dtype=torch.float32, layers=2))
        x = torch.ones(1, 128, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
            with torch.no_grad():
                model.layers[1].weight.mul_(2)
            loss = model(x).sum()  # with the cast of before: torch's cache does not know better

        with pytest.raises(RuntimeError, match=r"inplace operation: parameter `layers.1.weight`"):
            loss.backward()


class EditedBetween(nn.Module):
    """Edits its weight after the cast that it uses, twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        cast = self.weight.to(torch.bfloat16)
        with torch.no_grad():
            self.weight.mul_(0.5)
        return ((x @ cast) @ cast.t()).sum()


def test_a_cast_from_before_an_edit_is_kept_as_it_is(tmp_path):
    expected, found = (torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "12")
    plain = build(EditedBetween, dtype=torch.float32)
    plain(expected).backward()
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(EditedBetween, dtype=torch.float32))

        model(found).backward()

        assert same_bits(found.grad, expected.grad)
        assert same_bits(model.weight.grad, plain.weight.grad)
        assert same_bits(model.weight, plain.weight)


class TakesCast(nn.Module):
    """Computes with a cast that was made before."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x, cast):
        return ((x @ cast.t()) * self.weight.to(x.dtype)[0]).sum()


@pytest.mark.parametrize("change", ["edit", "edit through data", "step"])
def test_a_cast_from_before_its_unit_left_and_changed_is_kept_as_it_is(tmp_path, change):
    reference = Reference(build(TakesCast, dtype=torch.float32), **OPTIONS)
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(TakesCast, dtype=torch.float32))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        gradients = []
        for each in (model, reference.model):
            each.weight.sum().backward()
            cast = each.weight.to(torch.bfloat16)
            if change == "edit":
                with torch.no_grad():
                    each.weight.mul_(0.5)
            elif change == "edit through data":
                each.weight.data.mul_(0.5)
            else:
                (optimizer if each is model else reference).step()
            if each is model:
                session._wrapped.residency.evict_all()
            x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
            each(x, cast).backward()
            gradients.append(x.grad)

        assert same_bits(*gradients)
        require_equal_gradients(model, reference)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_cast_is_not_made_again_after_an_edit_through_data(tmp_path, leaves):
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(TakesCast, dtype=torch.float32))
        x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
        loss = model(x, model.weight.to(torch.bfloat16))
        model.weight.data.mul_(0.5)
        if leaves:
            session._wrapped.residency.evict_all()

        with pytest.raises(RuntimeError, match="found an edit through `.data`"):
            loss.backward()


class ChangedCast(nn.Module):
    """Computes with a cast that is changed in place before it is saved, or after."""

    def __init__(self, *, when, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.when = when

    def forward(self, x):
        cast = self.weight.to(torch.bfloat16)
        if self.when == "before":
            with torch.no_grad():
                cast.mul_(2)
        y = x @ cast.t()
        if self.when == "after":
            cast.mul_(2)
        return y


def test_a_cast_that_was_changed_is_kept_as_it_is(tmp_path):
    plain = build(ChangedCast, dtype=torch.float32, when="before")
    with open_session(tmp_path) as session:
        model = session.wrap(build(ChangedCast, dtype=torch.float32, when="before"))
        gradients = []
        for each in (model, plain):
            x = torch.ones(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            each(x).sum().backward()
            gradients.append(x.grad)

        assert same_bits(*gradients)
        require_equal_gradients(model, Reference(plain))


def test_a_cast_that_is_changed_after_it_was_saved_raises_as_in_torch(tmp_path):
    plain = build(ChangedCast, dtype=torch.float32, when="after")
    with open_session(tmp_path) as session:
        model = session.wrap(build(ChangedCast, dtype=torch.float32, when="after"))
        for each in (plain, model):
            x = torch.ones(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            loss = each(x).sum()

            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def in_a_thread(run):
    """Runs in a new thread, whose nodes are counted from 0."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def make_nodes(count):
    leaf = torch.ones(1, requires_grad=True)
    for _ in range(count):
        leaf * 2


def test_a_cast_of_another_thread_from_before_an_edit_is_kept_as_it_is(tmp_path):
    plain = build(TakesCast, dtype=torch.float32)

    def gradient(each, leave):
        def make_cast():
            make_nodes(20)
            return each.weight.to(torch.bfloat16)

        def edit_and_run():
            with torch.no_grad():
                each.weight.mul_(0.5)
            leave()
            each.weight.sum()  # the edit is seen in this thread
            make_nodes(40)  # more than the thread that made the cast
            x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
            each(x, cast).backward()
            return x.grad

        cast = in_a_thread(make_cast)
        return in_a_thread(edit_and_run)

    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(TakesCast, dtype=torch.float32))

        found = gradient(model, session._wrapped.residency.evict_all)

        assert same_bits(found, gradient(plain, lambda: None))
        assert same_bits(model.weight.grad, plain.weight.grad)


def test_passes_in_threads_of_their_own_keep_no_copy_of_a_weight(tmp_path):
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(Tower, dtype=torch.float32))
        cast_bytes = 2 * sum(layer.weight.numel() for layer in model.layers)
        make_nodes(1000)

        def peak():
            meter = ActivationMeter()
            x = torch.ones(1, 128, requires_grad=True)
            with meter.counting(without=model.parameters()):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(x).sum()
                loss.backward()
            return meter.peak_bytes

        for _ in range(2):
            with torch.no_grad():
                for layer in model.layers:
                    layer.weight.mul_(0.5)
            session._wrapped.residency.evict_all()
            for layer in model.layers:
                layer.weight.sum()  # the edits are seen in this thread

            assert in_a_thread(peak) < cast_bytes / 20


def test_edits_through_data_are_told_apart_whatever_thread_finds_them(tmp_path):
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(TakesCast, dtype=torch.float32))

        def edit():
            model.weight.data.mul_(0.5)
            session._wrapped.residency.evict_all()

        with ThreadPoolExecutor(1) as executor:
            executor.submit(edit).result()
            x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
            loss = model(x, model.weight.to(torch.bfloat16))
            executor.submit(edit).result()

        with pytest.raises(RuntimeError, match="found an edit through `.data`"):
            loss.backward()
