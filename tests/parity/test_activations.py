"""Activations that are computed again or moved away change no bit."""

import pytest
import torch
from parity.models import CheckpointedModel, SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn

import offload
from offload.runs.activations import ActivationMeter
from offload.streaming.activation_store import STORAGES_UNDER_WAY

MEMORY = 1 << 20
BLOCK_INPUT_BYTES = 2 * 16 * 32 * 2
"""Of `SmallGPT`: sequences, tokens, features, bytes of one."""
MOST_UNDER_WAY = 2 * STORAGES_UNDER_WAY
"""Two each way."""


def _activations(*, checkpoint="none", offload="none", memory=MEMORY, threshold=1):
    values = {"checkpoint": checkpoint, "offload": offload}
    if offload != "none":
        values.update(memory=memory, threshold=threshold)
    return {"activations": values}


def _session(tmp_path, placement=("storage", "storage"), *, budget_bytes=4 << 20, **options):
    return open_session(
        tmp_path, placement, budget_bytes=budget_bytes, config=_activations(**options)
    )


@pytest.mark.parametrize("placement", [("host", "host"), ("storage", "storage")])
@pytest.mark.parametrize("offload", ["none", "host", "storage"])
@pytest.mark.parametrize("checkpoint", ["none", "unit"])
def test_training_equals_the_reference(tmp_path, checkpoint, offload, placement):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with _session(tmp_path, placement, checkpoint=checkpoint, offload=offload) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, micro_steps=2, max_norm=0.05)

        require_equal_state(session, model, reference)
        stats = session.stats()
        assert (stats.activation_offload_bytes > 0) == (offload != "none")
        assert stats.activation_kept_bytes == 0
        assert stats.host_peak_bytes <= 4 << 20


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, nested
@pytest.mark.parametrize(("offload", "checkpoint"), [("storage", "none"), ("host", "unit")])
def test_checkpoints_of_the_user_s_own_go_together_with_both(tmp_path, checkpoint, offload):
    for form in ("segments", "nested", "inside"):
        for reentrant in (False, True):
            options = {"form": form, "reentrant": reentrant}
            plain = build(CheckpointedModel, **options)
            loss = loss_of(plain, 0)
            loss.backward()

            path = tmp_path / f"{form}-{reentrant}"
            with _session(path, checkpoint=checkpoint, offload=offload) as session:
                model = session.wrap(build(CheckpointedModel, **options))
                found = loss_of(model, 0)
                found.backward()

                assert same_bits(found, loss)
                for (name, parameter), expected in zip(
                    model.named_parameters(), plain.parameters(), strict=True
                ):
                    assert same_bits(parameter.grad.clone(), expected.grad), (options, name)


def _value(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


class Body(nn.Module):
    """One weight, and whatever is done with the input."""

    def __init__(self, body):
        super().__init__()
        self.weight = nn.Parameter(_value(64, 64))
        self.body = body

    def forward(self, x):
        return self.body(x @ self.weight)


@pytest.mark.parametrize("offload", ["host", "storage"])
def test_a_storage_that_is_saved_twice_is_moved_once(tmp_path, offload):
    def body(h):
        a, b = h.chunk(2, dim=1)  # views, saved by the product, of what `tanh` saves
        return h.tanh() * 2 + (a * b).repeat(1, 2)

    model = Body(body)
    with _session(tmp_path, offload=offload, threshold=16 * 64 * 4) as session:
        session.wrap(model)
        x = _value(16, 64)

        out = model(x)

        # `x`, `h` by the views, and what `tanh` gave.
        assert session.stats().activation_offload_bytes == 3 * 16 * 64 * 4
        out.sum().backward()
        plain = Body(body)
        plain(x).sum().backward()
        assert same_bits(model.weight.grad.clone(), plain.weight.grad)


def _of_cells(cell):
    def body(h):
        state = cell(h)
        return cell(h * 2, state)[0] if isinstance(state, tuple) else cell(h * 2, state)

    model = Body(body)
    model.cell = cell
    return model


def _gates_changed_one_by_one(h):
    """As a recurrent cell's: parts of one memory, each with a version counter of its own."""
    parts = [part.exp_() for part in torch.unsafe_chunk(h * 1, 2, dim=1)]
    return torch.cat([parts[0] * parts[1], parts[1]], dim=1)


@pytest.mark.parametrize("offload", ["host", "storage"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: _of_cells(nn.GRUCell(64, 64)),
        lambda: _of_cells(nn.LSTMCell(64, 64)),
        lambda: Body(_gates_changed_one_by_one),
    ],
    ids=["gru", "lstm", "parts"],
)
def test_tensors_over_one_memory_that_change_one_by_one_are_moved_one_by_one(
    tmp_path, offload, make
):
    model, plain = build(make, dtype=None), build(make, dtype=None)
    with _session(tmp_path, offload=offload) as session:
        session.wrap(model)
        x = _value(16, 64)

        model(x).square().mean().backward()

        plain(x).square().mean().backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(found.grad.clone(), expected.grad)


@pytest.mark.parametrize("offload", ["host", "storage"])
def test_changing_in_place_what_was_moved_raises_as_in_torch(tmp_path, offload):
    kept = []

    def body(h):
        h = h.exp()  # saves what it returns
        kept.append(h)
        return h * 2

    model = Body(body)
    with _session(tmp_path, offload=offload) as session:
        session.wrap(model)
        out = model(_value(16, 64))
        with torch.no_grad():
            kept[0].add_(1)

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("offload", ["host", "storage"])
def test_what_is_saved_again_after_a_change_is_moved_again(tmp_path, offload):
    def body(h):
        first = h.sin()  # saves `h`
        with torch.no_grad():
            h.mul_(1)  # nobody needs the first one: its gradient is not asked for
        return h.cos() + first.detach()  # saves `h` as it is now

    model, plain = Body(body), Body(body)
    x = _value(16, 64)
    plain(x).sum().backward()
    with _session(tmp_path, offload=offload) as session:
        session.wrap(model)

        model(x).sum().backward()

        assert same_bits(model.weight.grad.clone(), plain.weight.grad)


@pytest.mark.parametrize("offload", ["host", "storage"])
def test_a_graph_can_be_walked_twice_and_two_graphs_in_any_order(tmp_path, offload):
    model, plain = build(SmallGPT), build(SmallGPT)
    with _session(tmp_path, offload=offload, checkpoint="unit") as session:
        session.wrap(model)
        for each in (model, plain):
            first, second = loss_of(each, 0), loss_of(each, 1)
            first.backward(retain_graph=True)
            second.backward()
            first.backward()

        for (name, parameter), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert same_bits(parameter.grad.clone(), expected.grad), name


@pytest.mark.parametrize("offload", ["host", "storage"])
def test_graphs_that_are_dropped_give_their_room_back(tmp_path, offload):
    model = build(SmallGPT)
    with _session(tmp_path, offload=offload) as session:
        session.wrap(model)
        for index in range(12):
            loss_of(model, index)
        once = session.stats().activation_offload_peak_bytes

        loss_of(model, 0).backward()

        store = session._wrapped._activations._store
        assert once < session.stats().activation_offload_bytes / 6
        assert session.stats().activation_kept_bytes == 0
        while store._moves:
            store._finish_oldest()
        store._settle()
        assert store.counters.away_bytes == 0
        assert store._slots.num_free == store._slots.num_slots


def test_what_finds_no_room_stays_and_is_counted(tmp_path):
    model, plain = build(SmallGPT), build(SmallGPT)
    loss_of(plain, 0).backward()
    with _session(tmp_path, offload="host", memory=16 << 10, threshold=1024) as session:
        session.wrap(model)

        loss_of(model, 0).backward()

        stats = session.stats()
        assert 0 < stats.activation_offload_bytes < stats.activation_kept_bytes
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(found.grad.clone(), expected.grad)


def test_what_is_larger_than_the_slots_goes_to_storage_piece_by_piece(tmp_path):
    model, plain = build(SmallGPT), build(SmallGPT)
    loss_of(plain, 0).backward()
    with _session(tmp_path, offload="storage", memory=4096, threshold=1024) as session:
        session.wrap(model)

        loss_of(model, 0).backward()

        stats = session.stats()
        assert stats.activation_kept_bytes == 0
        assert stats.host_peak_bytes <= session._wrapped.plan.planned_bytes
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(found.grad.clone(), expected.grad)


@pytest.mark.unified  # where a copy is there at once: else it depends on the machine's other work
def test_backward_fetches_ahead_in_reverse_order(tmp_path):
    model = build(SmallGPT, layers=8)
    with _session(tmp_path, offload="host", checkpoint="unit", threshold=2048) as session:
        session.wrap(model)

        loss_of(model, 0).backward()

        stats = session.stats()
        num_blocks = len(model.blocks)
        assert stats.activation_hits + stats.activation_misses >= num_blocks
        assert stats.activation_misses <= 1


def test_hooks_of_the_user_s_around_the_model_keep_their_effect(tmp_path):
    model = build(SmallGPT)
    packed = []
    with _session(tmp_path, offload="host") as session:
        session.wrap(model)

        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            loss_of(model, 0).backward()

        assert packed
        assert session.stats().activation_offload_bytes == 0


def test_a_full_disk_keeps_activations_in_memory(tmp_path, monkeypatch, caplog):
    def refuse(self, memory, *, num_bytes):
        raise offload.StorageError("cannot write: no space", errno=28)

    monkeypatch.setattr("offload.storage.spill.Spill.write", refuse)
    model, plain = build(SmallGPT), build(SmallGPT)
    loss_of(plain, 0).backward()
    with _session(tmp_path, offload="storage") as session:
        session.wrap(model)

        loss_of(model, 0).backward()

        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(found.grad.clone(), expected.grad)
    assert caplog.text.count("activations stay in memory from now on") == 1


def test_bytes_that_changed_on_storage_are_found(tmp_path):
    model = build(SmallGPT)
    with _session(tmp_path, offload="storage", threshold=2048) as session:
        session.wrap(model)
        loss = loss_of(model, 0)
        store = session._wrapped._activations._store
        while store._moves:
            store._finish_oldest()
        for record in store._live.values():
            for piece in record.pieces:
                object.__setattr__(piece.place, "checksum", 0)

        with pytest.raises(offload.CorruptStateError, match="cannot read back what was spilled"):
            loss.backward()


def test_nothing_of_the_spill_files_is_left_in_the_store(tmp_path):
    model = build(SmallGPT)
    with _session(tmp_path, offload="storage") as session:
        session.wrap(model)

        loss_of(model, 0).backward()

        assert not list(tmp_path.rglob("*.spill"))


def test_a_backward_after_the_session_says_so(tmp_path):
    model = Body(lambda h: h.exp())
    with _session(tmp_path, ("host", "host"), offload="host") as session:
        session.wrap(model)
        out = model(_value(16, 64))
        store = session._wrapped._activations._store
        while store._moves:
            store._finish_oldest()

    with pytest.raises(offload.StoreError, match="call `backward\\(\\)` before the session ends"):
        out.sum().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo's
def test_a_compiled_block_goes_together_with_both(tmp_path):
    model, plain = build(SmallGPT), build(SmallGPT)
    for each in (model, plain):
        for block in each.blocks:
            block.compile(backend="aot_eager")
    loss_of(plain, 0).backward()
    with _session(tmp_path, offload="host", checkpoint="unit", threshold=2048) as session:
        session.wrap(model)

        loss_of(model, 0).backward()

        assert session.stats().activation_offload_bytes > 0
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(found.grad.clone(), expected.grad)


def _peak(tmp_path, *, layers, **options):
    model = build(SmallGPT, layers=layers)
    meter = ActivationMeter()
    with _session(
        tmp_path / f"{layers}", checkpoint="unit", budget_bytes=8 << 20, **options
    ) as session:
        session.wrap(model)
        with meter.counting(without=model.parameters()):
            loss_of(model, 0).backward()
    return meter.peak_bytes


def test_the_peak_grows_by_block_inputs_alone_under_checkpoints(tmp_path):
    assert _peak(tmp_path, layers=12) - _peak(tmp_path, layers=6) == 6 * BLOCK_INPUT_BYTES


@pytest.mark.parametrize("offload", ["host", "storage"])
def test_the_peak_does_not_grow_with_the_layers_where_block_inputs_are_moved(tmp_path, offload):
    few, many = (_peak(tmp_path, layers=n, offload=offload, threshold=2048) for n in (6, 18))

    # How many are under way when the rest is largest depends on how fast they move.
    assert abs(many - few) <= MOST_UNDER_WAY * BLOCK_INPUT_BYTES < 12 * BLOCK_INPUT_BYTES


@pytest.mark.slow
@pytest.mark.unified
@pytest.mark.parametrize("offload", ["host", "storage"])
def test_the_peak_of_a_run_does_not_grow_with_the_layers(tmp_path, small_config, train, offload):
    changes = {
        "train__steps": 4,
        "tiers__host__memory": "24MiB",
        "activations__checkpoint": "unit",
        "activations__offload": offload,
        "activations__threshold": 4096,
        "activations__memory": "1MiB",
    }

    few = train(small_config(model__layers=2, **changes), run_dir=tmp_path / "few")
    many = train(small_config(model__layers=8, **changes), run_dir=tmp_path / "many")

    block_input = 2 * 64 * 128 * 2  # sequences, tokens, features, bytes of one
    difference = many.activation_peak_bytes - few.activation_peak_bytes
    assert abs(difference) <= MOST_UNDER_WAY * block_input < 6 * block_input
    assert many.activation_offload_bytes_per_step > few.activation_offload_bytes_per_step > 0
    assert many.activation_hit_rate is not None


@pytest.mark.parametrize("offload", ["host", "storage"])
def test_waits_for_activations_are_in_the_stall_account(tmp_path, offload):
    with _session(tmp_path, offload=offload, memory=16 << 10) as session:
        model = session.wrap(build(SmallGPT))
        for index in range(2):
            loss_of(model, index).backward()
        stats = session.stats()
        root = session._store.roots[0]

    away = {s.cause for s in stats.stalls if s.waits_for in ("link", f"path {root}")}
    assert "moving activations away" in away or offload == "host"
    assert "bringing activations back" in away
    waited_s = sum(s.duration_s for s in stats.stalls if s.waits_for != "kernel")
    assert waited_s == pytest.approx(stats.io_wait_s, abs=1e-6)
