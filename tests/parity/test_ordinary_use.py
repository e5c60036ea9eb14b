"""What users do around a training loop has its plain effect, or is refused with what to do."""

import contextlib
import threading

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import same_bits
from parity.sessions import PLACEMENTS, open_session, use_small_records
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offload


class Nested(nn.Module):
    """Lists in a list, and a parameter of the root's that is held while all others are used."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Linear(32, 32) for _ in range(3)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x):
        for stage in self.stages:
            for layer in stage:
                x = x + functional.gelu(layer(x))
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x - self.mean) * self.scale


def make_nested():
    torch.manual_seed(0)
    return Nested()


def train(session, model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_a_resume_goes_on_with_the_buffers_of_the_commit(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model = session.wrap(make_nested())
        optimizer = session.AdamW(model.parameters())
        train(session, model, optimizer, range(3))
        session.commit()
        expected = train(session, model, optimizer, range(3, 6))

    with open_session(tmp_path, placement, resume=True) as session:
        model = session.wrap(make_nested())
        optimizer = session.AdamW(model.parameters())

        assert train(session, model, optimizer, range(3, 6)) == expected


class CalledAgain(Nested):
    """Another thread calls the model in the middle of a forward."""

    other = None

    def forward(self, x):
        if self.other is not None:
            thread = threading.Thread(target=self.other)
            self.other = None
            thread.start()
            thread.join()
        return super().forward(x)


USES = {
    "the model": lambda model, x: model(x),
    "a module in it": lambda model, x: model.stages[0][1](x),
    "a parameter": lambda model, _: model.stages[2][2].weight,
    "a state dict": lambda model, _: model.stages[2].state_dict(),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("caller", ["the model", "a module in it"])
def test_a_use_in_a_second_thread_is_refused_and_the_first_goes_on(tmp_path, caller, name):
    x, errors = torch.ones(4, 32), []
    owner = (lambda model: model) if caller == "the model" else (lambda model: model[0])

    def make():
        torch.manual_seed(0)
        return CalledAgain() if caller == "the model" else nn.Sequential(CalledAgain())

    expected = owner(make())(x)

    with open_session(tmp_path) as session:
        called = owner(session.wrap(make()))

        def use():
            try:
                USES[name](called, x)
            except offload.StoreError as error:
                errors.append(str(error))

        called.other = use
        found = called(x)
        again = threading.Thread(target=use)  # after the first has ended
        again.start()
        again.join()

    assert same_bits(found, expected)
    assert [error[:36] for error in errors] == ["cannot use a wrapped model in two th"]


@pytest.mark.unified
def test_the_smallest_budget_covers_units_that_enclosing_calls_hold(tmp_path):
    with open_session(tmp_path) as session:
        session.wrap(make_nested())
        smallest = session._wrapped.plan.smallest_bytes

    with offload.Session(host_memory=smallest, store=tmp_path / "small") as session:
        model = session.wrap(make_nested())
        optimizer = session.AdamW(model.parameters())

        assert len(train(session, model, optimizer, range(2))) == 2
        assert session.stats().host_peak_bytes <= smallest


@pytest.mark.parametrize("gradient_dtype", ["parameter", "float32"])
def test_gradients_from_before_wrapping_count(tmp_path, gradient_dtype):
    plain, wrapped = build(SmallGPT), build(SmallGPT)
    for model in (plain, wrapped):
        loss_of(model, 0).backward()
    if gradient_dtype == "float32":
        for parameter in plain.parameters():
            before, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            parameter.grad = before.float()

    config = {"train": {"gradient_dtype": gradient_dtype}}
    with open_session(tmp_path, config=config) as session:
        session.wrap(wrapped)
        for model in (plain, wrapped):
            loss_of(model, 1).backward()

        for (name, p), q in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
            assert same_bits(p.grad, q.grad.clone()), name


@pytest.mark.unified
@pytest.mark.parametrize("is_shown", [True, False])
def test_a_model_takes_gradients_of_its_own_dtype_after_a_session_of_another(tmp_path, is_shown):
    model, plain = build(SmallGPT), build(SmallGPT)
    config = {"train": {"gradient_dtype": "float32"}}
    with open_session(tmp_path / "a", ("host", "storage"), config=config) as session:
        session.wrap(model)
        loss_of(model, 0).backward()
        if not is_shown:
            model.zero_grad()
    assert not is_shown or model.head.weight.grad.dtype is torch.float32

    model.zero_grad()
    for each in plain, model:
        loss_of(each, 1).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with open_session(tmp_path / "b", ("host", "storage")) as session:
        session.wrap(model)
        loss_of(model, 1).backward()
        again = [parameter.grad.clone() for parameter in model.parameters()]

    expected = [parameter.grad for parameter in plain.parameters()]
    assert all(map(same_bits, found, expected))
    assert all(map(same_bits, again, expected))


def test_a_dtype_of_gradients_that_is_not_the_session_s_is_refused(tmp_path):
    model = build(SmallGPT)
    model.head.weight.grad_dtype = torch.float32

    with open_session(tmp_path) as session:
        with pytest.raises(offload.ConfigError, match=r"`head\.weight`: expected.*float32"):
            session.wrap(model)
        model.head.weight.grad_dtype = torch.bfloat16
        session.wrap(model)


@pytest.mark.unified  # on a device they are in slots, and it is refused
@pytest.mark.parametrize("placement", [("host", "host"), ("host", "storage")], ids="-".join)
def test_replaced_data_of_a_resident_parameter_is_trained_on(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        replaced = model.head.weight.data * 0.5
        model.head.weight.data = replaced.clone()

        loss_of(model, 0).backward()
        optimizer.step()

        assert not model.head.weight.equal(replaced)
        assert (model.head.weight - replaced).abs().max() < 0.01


def test_a_session_that_refuses_a_model_leaves_nothing(tmp_path):
    session = offload.Session(host_memory="1KiB", paths=[tmp_path])

    with pytest.raises(offload.PlanError), session:
        session.wrap(torch.nn.Linear(256, 256))

    assert list(tmp_path.iterdir()) == []


def test_parameters_that_share_memory_are_refused_by_name(tmp_path):
    model = nn.Module()
    values = torch.zeros(64)
    model.a, model.b = nn.Parameter(values), nn.Parameter(values[:16])

    with (
        open_session(tmp_path) as session,
        pytest.raises(offload.ConfigError, match="`a` and `b`.*share"),
    ):
        session.wrap(model)


@pytest.mark.parametrize("edit", [
    lambda p: p[(0,) * p.dim()].fill_(1.0),
    lambda p: p.data[(0,) * p.dim()].fill_(1.0),
    lambda p: p.fill_(torch.nan),
    lambda p: p.data.fill_(torch.nan),
    lambda p: p.detach()[(0,) * p.dim()].mul_(2.0),  # NaN as before
])  # fmt: skip
def test_a_write_to_an_absent_parameter_is_refused_not_lost(tmp_path, edit):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        with torch.no_grad():
            for parameter in model.parameters():
                edit(parameter)

        for use in (session.commit, session.state_digest, *[lambda: loss_of(model, 0)] * 2):
            with pytest.raises(offload.StoreError, match="while it was not in memory"):
                use()


def test_a_moving_average_of_what_state_dict_returns_is_that_of_a_plain_model(tmp_path):
    averages = []
    for in_memory in (False, True):
        with open_session(tmp_path / f"{in_memory}", offload=not in_memory) as session:
            average = AveragedModel(build(SmallGPT), multi_avg_fn=get_ema_multi_avg_fn(0.9))
            now, model = build(SmallGPT), session.wrap(build(SmallGPT))
            optimizer = session.AdamW(model.parameters(), lr=1e-2)
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                now.load_state_dict(model.state_dict())
                average.update_parameters(model if in_memory else now)
            averages.append(average.module.state_dict())

    assert not any(values.isnan().any() for values in averages[0].values())
    assert all(same_bits(averages[0][name], averages[1][name]) for name in averages[0])


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.float64)])
def test_a_cast_of_a_wrapped_model_is_refused_with_both_dtypes(tmp_path, cast):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        cast(model)

        for _ in range(2):
            with pytest.raises(offload.StoreError, match=r"expected it in .* before `wrap`"):
                loss_of(model, 0)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_interrupts_leave_no_unit_held(tmp_path, where):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))

        def interrupt(*_):
            raise KeyboardInterrupt

        for _ in range(5):
            if where == "forward":
                handle = model.blocks[1].register_forward_hook(interrupt)
            else:
                handle = model.tokens.weight.register_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, 0).backward()
            handle.remove()

        assert loss_of(model, 0).item() == loss_of(build(SmallGPT), 0).item()


def test_a_fetch_that_is_interrupted_as_it_begins_is_begun_anew(tmp_path, monkeypatch):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        tier = session._wrapped.residency._tier

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(tier, "start_read", interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, 0)

        assert loss_of(model, 0).item() == loss_of(build(SmallGPT), 0).item()


@pytest.mark.parametrize("overlap", ["forward", "none"])
def test_a_fetch_of_which_a_part_cannot_begin_keeps_no_slot(tmp_path, monkeypatch, overlap):
    use_small_records(monkeypatch)
    with open_session(tmp_path, budget_bytes=400_000, overlap=overlap) as session:
        model = session.wrap(build(SmallGPT))
        read = session._store.read

        def refuse(record, *args, **kwargs):
            if record.endswith("blocks.1#2"):  # reads of two others have begun
                raise offload.StorageError("cannot read: no such device")
            return read(record, *args, **kwargs)

        for _ in range(2 * session._wrapped.plan.num_slots):
            with monkeypatch.context() as patched:
                patched.setattr(session._store, "read", refuse)
                with pytest.raises(offload.StorageError, match="no such device"):
                    loss_of(model, 0)

        assert loss_of(model, 0).item() == loss_of(build(SmallGPT), 0).item()


def test_an_update_that_is_interrupted_is_not_committed(tmp_path, monkeypatch):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        loss_of(model, 0).backward()

        def interrupt(_):
            raise KeyboardInterrupt

        monkeypatch.setattr("torch.autograd.graph.increment_version", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()

        with pytest.raises(offload.StoreError, match="between two steps"):
            session.commit()


@pytest.mark.parametrize("wrong", [
    {"paths": "nowhere"},
    {"paths": ["."], "resume": "yes"},
])  # fmt: skip
def test_wrong_arguments_are_refused_and_nothing_is_made(tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(offload.ConfigError):
        offload.Session(host_memory="1MiB", **wrong)

    assert list(tmp_path.iterdir()) == []


def test_a_model_is_wrapped_by_one_session_only(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))

        with offload.Session(offload=False) as other:
            with pytest.raises(offload.StoreError, match="another session has wrapped"):
                other.wrap(model)
            with pytest.raises(offload.ConfigError, match="expected a torch.nn.Module"):
                other.wrap(3)


@pytest.mark.parametrize("parameters", ["storage", "host", "device"])
def test_a_default_device_is_for_tensors_of_the_program_alone(tmp_path, parameters):
    digests, values = [], []
    for index, default in enumerate((torch.device("meta"), contextlib.nullcontext())):
        model = build(SmallGPT)
        with open_session(tmp_path / str(index), (parameters, "storage")) as session:
            with default:
                session.wrap(model)
                optimizer = session.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                loss = loss_of(model, step)
                with default:
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()
                    optimizer.zero_grad()
            with default:
                session.commit()
                digests.append(session.state_digest())
                values.append({n: v.clone() for n, v in model.state_dict().items()})

    assert digests[0] == digests[1]
    assert all(same_bits(each, values[1][name]) for name, each in values[0].items())
