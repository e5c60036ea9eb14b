"""Compiled blocks of a wrapped model give the bits of the same compiled blocks in memory."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_gradients, require_equal_state, train_both
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

pytestmark = [
    pytest.mark.slow,
    # torch's own, while it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

LAYERS = 3


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    # More would be a pool of threads that outlives the test.
    with inductor_config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def make():
    return build(SmallGPT, dtype=torch.float32, layers=LAYERS)


def compile_in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)


def compile_as_modules(model, backend):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_graph_serves_every_block_in_every_slot(tmp_path, backend, when):
    reference = Reference(make(), **OPTIONS)
    compile_in_place(reference.model, backend)
    with open_session(tmp_path) as session:
        model = make()
        if when == "before":
            compile_in_place(model, backend)
        session.wrap(model)
        if when == "after":
            compile_in_place(model, backend)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        counters.clear()
        train_both(model, optimizer, reference, steps=3, micro_steps=2)

        require_equal_state(session, model, reference)
        assert counters["stats"]["unique_graphs"] == 2, "one of the model, one of the reference"


def test_compiled_modules_as_blocks(tmp_path):
    plain = make()
    compile_as_modules(plain, "aot_eager")  # which changes names: `blocks.0._orig_mod.up.weight`
    reference = Reference(plain, **OPTIONS)
    with open_session(tmp_path) as session:
        model = make()
        compile_as_modules(model, "aot_eager")
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3)

        require_equal_state(session, model, reference)


def test_a_compiled_model_breaks_its_graph_at_units(tmp_path):
    reference = Reference(make(), **OPTIONS)
    with open_session(tmp_path) as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        compiled = torch.compile(model, backend="aot_eager")  # with the bits of eager

        counters.clear()
        train_both(
            model,
            optimizer,
            reference,
            steps=3,
            loss_of=lambda m, index: loss_of(compiled if m is model else m, index),
        )

        require_equal_state(session, model, reference)
        reasons = " ".join(counters["graph_break"])
        assert "_call_eagerly" in reasons


def test_a_compiled_block_is_refetched_after_an_edit(tmp_path):
    reference = Reference(make(), **OPTIONS)
    with open_session(tmp_path) as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for m in (model, reference.model):
            compile_in_place(m, "aot_eager")
        train_both(model, optimizer, reference, steps=1)
        for m in (model, reference.model):
            with torch.no_grad():
                m.blocks[1].up.weight.mul_(0.5)
        reference.edited("blocks.1.up.weight")

        train_both(model, optimizer, reference, steps=2, first=1)

        require_equal_gradients(model, reference)
        require_equal_state(session, model, reference)
