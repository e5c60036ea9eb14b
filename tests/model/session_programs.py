"""Random programs over a session, beside the same program in memory: equal bit for bit.

A program is what a user's own loop may do between `wrap` and `close`, in any order, under any
policy; what is compared comes from `parity.oracle`, which knows nothing of the package.
"""

import contextlib
import copy
import gc
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import assume, note
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from parity.architectures import ARCHITECTURES
from parity.oracle import Reference, same_bits
from parity.sessions import SMALL_RECORD_ELEMENTS
from parity.side_by_side import require_equal_gradients, require_equal_state
from torch import nn

import offload

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
GENEROUS = 8 << 20
RECORD_SIZES = "offload.plan.record_size.SIZES"


@st.composite
def policies(draw):
    """Draws a legal policy, how much more than the least memory there is, and the window."""
    parameters = draw(st.sampled_from(["storage", "storage", "host", "device"]))
    optimizer = draw(st.sampled_from(["storage", "host"]))
    overlap = draw(st.sampled_from(["none", "forward", "backward", "both"]))
    if overlap in ("backward", "both"):
        parameters = optimizer = "storage"
    orders = ["sequential", "alternating", "resident"] if overlap == "none" else ["resident"]
    policy = {
        "parameters": parameters,
        "optimizer": optimizer,
        "overlap": overlap,
        "order": draw(st.sampled_from(orders)),
        "prefetch": draw(st.integers(0, 3)),
        "striping": draw(st.sampled_from(["adaptive", "modulo"])),
    }
    more_bytes = draw(st.sampled_from([0, 0, 10_000, 60_000, GENEROUS]))
    return policy, more_bytes, draw(st.sampled_from([1, 20_000, 64 << 20]))


class SessionMachine(RuleBasedStateMachine):
    """One session or several after each other on one store, and the reference."""

    device = "cpu"

    @initialize(
        name=st.sampled_from(sorted(ARCHITECTURES)),
        dtype=st.sampled_from([torch.bfloat16, torch.float32]),
        codec=st.sampled_from(["split", "fp32"]),
        gradient_dtype=st.sampled_from(["parameter", "parameter", "float32"]),
        num_paths=st.integers(1, 2),
        checkpoint=st.sampled_from(["none", "unit"]),
        moved=st.sampled_from(["none", "none", "host", "storage"]),
        policy=policies(),
    )
    def start(self, name, dtype, codec, gradient_dtype, num_paths, checkpoint, moved, policy):
        # Tensors saved within a recomputation are computed again, dropout and chance included.
        assume(checkpoint == "none" or name not in ("random_depth", "convolutional"))
        self.directory = Path(tempfile.mkdtemp(prefix="offload-program-"))
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(mock.patch(RECORD_SIZES, (SMALL_RECORD_ELEMENTS,)))
        self.architecture, self.dtype, self.codec = ARCHITECTURES[name], dtype, codec
        self.stores = [self.directory / f"path{index}" for index in range(num_paths)]
        self.activations = {"checkpoint": checkpoint, "offload": moved, "threshold": "1KiB",
                            "memory": "64KiB"}  # fmt: skip
        self.gradient_dtype = gradient_dtype
        self.go_on_from(Reference(self.architecture.build(dtype), **OPTIONS))
        self.committed, self.saved = None, {}
        self.index = 0
        self.lr = OPTIONS["lr"]
        self.session = None
        self.open(policy, resume=False)

    def teardown(self):
        if hasattr(self, "directory"):
            if self.session is not None:
                self.session.close()
            self.model = self.optimizer = None
            self.stack.close()
            shutil.rmtree(self.directory)
            gc.collect()

    def open(self, policy, *, resume):
        self.policy, more_bytes, self.window = policy
        if self.device != "cpu" and self.is_early():
            self.policy = {**self.policy, "overlap": "forward"}  # the others are refused there
        note(f"{self.policy}, {more_bytes} bytes more than needed, a window of {self.window}")
        host_bytes, device_bytes = self.smallest_bytes()
        options = {} if device_bytes is None else {"device_memory": device_bytes + more_bytes}
        self.session = self.new_session(
            self.stores, host_memory=host_bytes + more_bytes, resume=resume, **options
        )
        self.session.open()
        self.model = self.session.wrap(self.architecture.build(self.dtype))
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.session.AdamW(trainable, **OPTIONS)
        self.set_lr(self.lr)

    def smallest_bytes(self):
        stores = [self.directory / "planned"]
        options = {} if self.device == "cpu" else {"device_memory": GENEROUS}
        with self.new_session(stores, host_memory=GENEROUS, **options) as session:
            session.wrap(self.architecture.build(self.dtype))
            wrapped = session._wrapped
            device_bytes = None if self.device == "cpu" else wrapped.device_plan.smallest_bytes
            host_bytes = wrapped.plan.smallest_bytes
        shutil.rmtree(stores[0], ignore_errors=True)  # one without records is gone by now
        return host_bytes, device_bytes

    def new_session(self, stores, **options):
        window = min(self.window, options["host_memory"])
        return offload.Session(
            {"activations": self.activations, "tiers": {"host": {"window": window}}},
            device=self.device,
            store=stores,
            policy=self.policy,
            codec=self.codec,
            gradient_dtype=self.gradient_dtype,
            **options,
        )

    def go_on_from(self, reference):
        self.reference = reference
        self.before_edits = {}
        if self.gradient_dtype == "float32":
            for parameter in reference.trainable.values():
                parameter.grad_dtype = torch.float32

    def set_lr(self, lr):
        self.lr = self.reference.options["lr"] = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def is_early(self):
        return self.policy["overlap"] in ("backward", "both")

    def both(self):
        return self.model, self.reference.model

    def parameter(self, data):
        """Draws a trainable parameter: its name, and where both models have it as an attribute."""
        name = data.draw(st.sampled_from(sorted(self.reference.trainable)))
        owner, _, attribute = name.rpartition(".")
        found = (getattr(model.get_submodule(owner), attribute) for model in self.both())
        return name, found

    @rule(is_last=st.booleans(), retains=st.booleans())
    def backward(self, is_last, retains):
        found, expected = (self.architecture.losses(m, self.index) for m in self.both())
        self.index += 1
        assert all(map(same_bits, found, expected))
        for losses in (found, expected):
            is_streamed = losses is found and not is_last
            around = self.session.accumulating() if is_streamed else contextlib.nullcontext()
            with around:
                for number, loss in enumerate(losses):
                    loss.backward(retain_graph=retains or number < len(losses) - 1)
                if retains:
                    losses[0].backward()

    @rule(
        max_norm=st.sampled_from([None, None, 0.05, 1e6]),
        sets_to_none=st.sampled_from([True, True, True, False]),
    )
    def step(self, max_norm, sets_to_none):
        if max_norm is not None and not self.is_early():
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            assert norm.item() == self.reference.clip(max_norm)
        self.optimizer.step()
        self.before_edits.clear()
        self.optimizer.zero_grad(set_to_none=sets_to_none)
        self.reference.step()
        self.reference.model.zero_grad(set_to_none=sets_to_none)

    @rule()
    def train_a_step(self):
        self.backward(is_last=True, retains=False)
        self.step(max_norm=None, sets_to_none=True)

    @rule(sets_to_none=st.booleans())
    def drop_gradients(self, sets_to_none):
        self.optimizer.zero_grad(set_to_none=sets_to_none)
        self.reference.model.zero_grad(set_to_none=sets_to_none)

    @rule()
    def forward_alone(self):
        found, expected = (self.architecture.losses(m, self.index) for m in self.both())
        assert all(map(same_bits, found, expected))

    @rule()
    def evaluate(self):
        for model in self.both():
            model.eval()
        with torch.no_grad():
            self.forward_alone()
        for model in self.both():
            model.train()

    @rule()
    def fail_in_forward(self):
        def interrupt(*_):
            raise InterruptedError

        for model in self.both():
            last = list(model.modules())[-1]
            handle = last.register_forward_pre_hook(interrupt)
            with contextlib.suppress(InterruptedError):
                self.architecture.losses(model, self.index)
            handle.remove()

    @rule(data=st.data())
    def fail_in_backward(self, data):
        def interrupt(_):
            raise InterruptedError

        _, parameters = self.parameter(data)
        for model, parameter in zip(self.both(), parameters, strict=True):
            handle = parameter.register_hook(interrupt)
            with contextlib.suppress(InterruptedError):
                for loss in self.architecture.losses(model, self.index):
                    loss.backward(retain_graph=True)
            handle.remove()
        self.drop_gradients(sets_to_none=True)

    @rule(data=st.data())
    def load_weights(self, data):
        seed = data.draw(st.integers(0, 3))
        generator = torch.Generator().manual_seed(seed)
        values = {
            name: torch.randn(value.shape, generator=generator).mul(0.02).to(value.dtype)
            for name, value in self.reference.model.state_dict().items()
            if value.is_floating_point()
        }
        for model in self.both():
            model.load_state_dict(values, strict=False)
        for name in self.reference.trainable:
            self.is_edited(name)

    @rule(data=st.data(), factor=st.sampled_from([0.5, -1.0, 1.25]))
    def edit(self, data, factor):
        name, parameters = self.parameter(data)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(factor)
        self.is_edited(name)

    def is_edited(self, name):
        self.before_edits.pop(name, None)
        self.reference.edited(name)

    @rule(
        data=st.data(),
        change=st.sampled_from(
            [
                lambda values: values.neg_(),
                lambda values: values.mul_(0.5),
                lambda values: values.copy_(values.flip(0) if values.dim() else values),
                lambda values: values.view(-1)[:1].fill_(0.0),
                lambda values: values.view(-1)[-1:].neg_(),
            ]
        ),
    )
    def edit_through_data(self, data, change):
        """What is again as the last update or commit left it was not edited."""
        name, parameters = self.parameter(data)
        expected = self.reference.trainable[name]
        master = self.reference.masters[name]
        values, master = self.before_edits.setdefault(name, (expected.detach().clone(), master))
        for parameter in parameters:
            change(parameter.data)
        self.reference.edited(name)
        if same_bits(expected, values):
            self.reference.masters[name] = master

    def is_resident(self):
        on_device = self.policy["parameters"] == "device"
        return on_device or (self.policy["parameters"] == "host" and self.device == "cpu")

    @precondition(lambda self: self.is_resident())
    @rule(data=st.data())
    def replace_data(self, data):
        name, parameters = self.parameter(data)
        for parameter in parameters:
            parameter.data = parameter.data * 0.5
        self.is_edited(name)

    @precondition(lambda self: not self.is_early())
    @rule(data=st.data(), scales=st.booleans())
    def change_gradient(self, data, scales):
        name, _ = self.parameter(data)
        for model in self.both():
            gradient = model.get_parameter(name).grad
            if gradient is not None:
                # A product is not rounded before the update: one by a power of two never is.
                gradient.mul_(0.5) if scales else gradient.add_(0.25)

    @precondition(lambda self: not self.is_early())
    @rule(data=st.data())
    def drop_gradient(self, data):
        name, _ = self.parameter(data)
        for model in self.both():
            model.get_parameter(name).grad = None

    @rule(lr=st.sampled_from([1e-3, 1e-2]))
    def schedule(self, lr):
        self.set_lr(lr)

    @rule()
    def compare_gradients(self):
        require_equal_gradients(self.model, self.reference)

    @rule()
    def compare_state(self):
        require_equal_state(self.session, self.model, self.reference)
        self.before_edits.clear()

    @rule()
    def commit(self):
        self.session.commit({"lr": self.lr})
        self.before_edits.clear()
        self.committed = copy.deepcopy(self.reference)

    @rule(name=st.sampled_from(["a", "b"]))
    def save(self, name):
        if name in self.saved:
            return
        self.session.save(name)
        self.before_edits.clear()
        self.saved[name] = self.committed = copy.deepcopy(self.reference)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data):
        name = data.draw(st.sampled_from(sorted(self.saved)))
        self.drop_gradients(sets_to_none=True)
        self.session.load(name)
        self.go_on_from(copy.deepcopy(self.saved[name]))
        self.set_lr(self.lr)
        self.compare_state()

    @precondition(lambda self: self.committed is not None)
    @rule(policy=policies())
    def close_and_resume(self, policy):
        self.session.close()
        self.open(policy, resume=True)
        self.go_on_from(copy.deepcopy(self.committed))
        self.set_lr(self.lr)
        self.compare_state()

    @invariant()
    def budgets_hold(self):
        if getattr(self, "session", None) is None:
            return
        stats, tiers = self.session.stats(), self.session.config.tiers
        assert stats.host_peak_bytes <= tiers.host.memory
        assert self.device == "cpu" or stats.device_peak_bytes <= tiers.device.memory


class EmulatedSessionMachine(SessionMachine):
    """The same on a device with memory of its own."""

    device = "emulated"
