"""Random programs over a session, beside the same program in memory: equal bit for bit.

A program is what a user's own loop may do between `wrap` and `close`, in any order, under any
policy; what is compared comes from `parity.oracle`, which knows nothing of the package.
"""

import contextlib
import copy
import gc
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import assume, note
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model.further_rules import FurtherRules
from model.program_parts import GENEROUS, Member, policies, refusing
from parity.architectures import ARCHITECTURES
from parity.oracle import same_bits
from parity.sessions import SMALL_RECORD_ELEMENTS
from parity.side_by_side import require_equal_gradients
from torch import nn

import offload
from offload.errors import BudgetError, OffloadError, StoreError

RECORD_SIZES = "offload.plan.record_size.SIZES"
SECOND = "second"
"""The name of a further model, where there is one."""


class SessionMachine(FurtherRules, RuleBasedStateMachine):
    """One session or several after each other on one store, and the reference of each model.

    Attributes:
        members: The models, in the order in which they are wrapped.
        at: The one that rules use now.
    """

    device = "cpu"

    @initialize(
        name=st.sampled_from(sorted(ARCHITECTURES)),
        dtype=st.sampled_from([torch.bfloat16, torch.float32]),
        codec=st.sampled_from(["split", "fp32"]),
        gradient_dtype=st.sampled_from(["parameter", "parameter", "float32"]),
        num_paths=st.integers(1, 2),
        checkpoint=st.sampled_from(["none", "unit"]),
        moved=st.sampled_from(["none", "none", "host", "storage"]),
        second=st.sampled_from([None, None, "nested_lists", "two_heads", "low_rank"]),
        policy=policies(),
    )
    def start(
        self, name, dtype, codec, gradient_dtype, num_paths, checkpoint, moved, second, policy
    ):
        # Tensors saved within a recomputation are computed again, dropout and chance included.
        assume(checkpoint == "none" or name not in ("random_depth", "convolutional"))
        self.directory = Path(tempfile.mkdtemp(prefix="offload-program-"))
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(mock.patch(RECORD_SIZES, (SMALL_RECORD_ELEMENTS,)))
        self.codec = codec
        self.stores = [self.directory / f"path{index}" for index in range(num_paths)]
        self.activations = {"checkpoint": checkpoint, "offload": moved}
        if moved != "none":
            self.activations |= {"threshold": "1KiB", "memory": "64KiB"}
        self.gradient_dtype = gradient_dtype
        main = Member("", ARCHITECTURES[name], dtype, gradient_dtype)
        self.members, self.at = [main], main
        if second is not None:
            self.members.insert(0, Member(SECOND, ARCHITECTURES[second], dtype, gradient_dtype))
        self.committed, self.saved = None, {}
        self.index = 0
        self.session = None
        self.open(policy, resume=False)

    def teardown(self):
        if hasattr(self, "directory"):
            if self.session is not None:
                self.session.close()
            self.members = self.at = None
            self.stack.close()
            shutil.rmtree(self.directory)
            gc.collect()

    def open(self, policy, *, resume):
        self.policy, more_bytes, self.window = policy
        note(f"{self.policy}, {more_bytes} bytes more than needed, a window of {self.window}")
        parts = self.smallest_parts()
        whole = {tier: sum(part[tier] for part in parts) + more_bytes for tier in parts[0]}
        self.session = self.new_session(self.stores, resume=resume, **whole)
        self.session.open()
        for member, part in zip(self.members, parts, strict=True):
            member.wrap(self.session, **(part if member.name else {}))

    def smallest_parts(self):
        """Returns the least memory of each model, by tier."""
        stores, tiers = [self.directory / "planned"], ["host_memory"]
        if self.device != "cpu":
            tiers.append("device_memory")
        with self.new_session(stores, **dict.fromkeys(tiers, 2 * GENEROUS)) as session:
            found = []
            for member in self.members:
                name = {"name": member.name, **dict.fromkeys(tiers, GENEROUS)}
                session.wrap(member.build(), **(name if member.name else {}))
                wrapped = session._models.all()[-1]
                found.append({"host_memory": wrapped.plan.smallest_bytes})
                if self.device != "cpu":
                    found[-1]["device_memory"] = wrapped.device_plan.smallest_bytes
        shutil.rmtree(stores[0], ignore_errors=True)  # one without records is gone by now
        return found

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

    @property
    def model(self):
        return self.at.model

    @property
    def optimizer(self):
        return self.at.optimizer

    @property
    def reference(self):
        return self.at.reference

    def both(self):
        return self.at.both()

    def losses(self, *, autocast=False):
        """Returns those of the model and of the reference."""
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return [self.at.architecture.losses(m, self.index) for m in self.both()]

    def may_autocast(self):
        """Casts of weights that are used twice are others where they are computed again.

        The mixture of experts writes what it casts into what it does not.
        """
        is_mixture = self.at.architecture is ARCHITECTURES["mixture_of_experts"]
        return self.activations["checkpoint"] == "none" and not is_mixture

    def is_early(self):
        return self.policy["overlap"] in ("backward", "both")

    def parameter(self, data):
        """Draws a trainable parameter: its name, and where both models have it as an attribute."""
        name = data.draw(st.sampled_from(sorted(self.reference.trainable)))
        owner, _, attribute = name.rpartition(".")
        found = (getattr(model.get_submodule(owner), attribute) for model in self.both())
        return name, found

    @precondition(lambda self: len(self.members) > 1)
    @rule()
    def turn_to_the_other_model(self):
        self.at = next(member for member in self.members if member is not self.at)

    @rule(is_last=st.booleans(), retains=st.booleans(), autocast=st.sampled_from([False, True]))
    def backward(self, is_last, retains, autocast):
        found, expected = self.losses(autocast=autocast and self.may_autocast())
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
        self.at.before_edits.clear()
        self.optimizer.zero_grad(set_to_none=sets_to_none)
        self.reference.step()
        self.reference.model.zero_grad(set_to_none=sets_to_none)

    @rule()
    def train_a_step(self):
        self.backward(is_last=True, retains=False, autocast=False)
        self.step(max_norm=None, sets_to_none=True)

    @rule(sets_to_none=st.booleans())
    def drop_gradients(self, sets_to_none):
        self.optimizer.zero_grad(set_to_none=sets_to_none)
        self.reference.model.zero_grad(set_to_none=sets_to_none)

    @rule()
    def forward_alone(self):
        found, expected = self.losses()
        assert all(map(same_bits, found, expected))

    @rule(data=st.data())
    def gradient_alone(self, data):
        """`autograd.grad` for one parameter; `p.grad` stays what it is."""
        _, parameters = self.parameter(data)
        gradients = [
            torch.autograd.grad(losses[0], parameter, allow_unused=True)[0]
            for losses, parameter in zip(self.losses(), parameters, strict=True)
        ]
        assert (gradients[0] is None) == (gradients[1] is None)
        assert gradients[0] is None or same_bits(*gradients)

    @rule()
    def copy_model(self):
        copied = copy.deepcopy(self.model)
        for (name, value), expected in zip(
            copied.state_dict().items(), self.reference.model.state_dict().values(), strict=True
        ):
            assert same_bits(value, expected), name

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
                self.at.architecture.losses(model, self.index)
            handle.remove()

    @rule(data=st.data())
    def fail_in_backward(self, data):
        def interrupt(_):
            raise InterruptedError

        _, parameters = self.parameter(data)
        for model, parameter in zip(self.both(), parameters, strict=True):
            handle = parameter.register_hook(interrupt)
            with contextlib.suppress(InterruptedError):
                for loss in self.at.architecture.losses(model, self.index):
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
            self.at.is_edited(name)

    @rule(data=st.data(), factor=st.sampled_from([0.5, -1.0, 1.25]))
    def edit(self, data, factor):
        name, parameters = self.parameter(data)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(factor)
        self.at.is_edited(name)

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
        before = self.at.before_edits
        values, master = before.setdefault(name, (expected.detach().clone(), master))
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
        self.at.is_edited(name)

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
        self.at.set_lr(lr)

    @rule(lr=st.sampled_from([1e-3, 1e-2]))
    def load_options(self, lr):
        options, before = json.loads(json.dumps(self.optimizer.state_dict())), self.at.lr
        self.at.set_lr(lr)
        with contextlib.suppress(StoreError):
            self.optimizer.load_state_dict({**options, "step": options["step"] + 1})
            raise AssertionError("the options of another step were loaded")
        assert self.optimizer.param_groups[0]["lr"] == lr
        self.optimizer.load_state_dict(options)
        assert self.optimizer.param_groups[0]["lr"] == before
        self.at.set_lr(before)

    @rule()
    def compare_gradients(self):
        require_equal_gradients(self.model, self.reference)

    @rule()
    def compare_state(self):
        self.at.require_equal_state(self.session)

    def facts(self):
        """Returns the metadata of a commit: the options of the main model's optimizer."""
        return {"optimizer": self.members[-1].optimizer.state_dict()}

    def note_committed(self):
        for member in self.members:
            member.before_edits.clear()
        self.committed = [copy.deepcopy(member.reference) for member in self.members]

    def go_on_from(self, references):
        for member, reference in zip(self.members, references, strict=True):
            member.go_on_from(reference)
            member.set_lr(member.lr)
            member.require_equal_state(self.session)

    def drop_all_gradients(self):
        for member in self.members:
            member.optimizer.zero_grad()
            member.reference.model.zero_grad()

    @rule()
    def commit(self):
        self.session.commit(self.facts())
        self.note_committed()

    @rule(name=st.sampled_from(["a", "b"]))
    def save(self, name):
        self.session.save(name, self.facts())
        self.note_committed()
        self.saved[name] = self.committed

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def delete(self, data):
        name = data.draw(st.sampled_from(sorted(self.saved)))
        self.session.delete_checkpoint(name)
        del self.saved[name]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data):
        self.drop_all_gradients()
        self.load_saved(data)

    def load_saved(self, data):
        name = data.draw(st.sampled_from(sorted(self.saved)))
        self.session.load(name)
        self.go_on_from(self.saved[name])

    @precondition(lambda self: self.committed is not None)
    @rule(policy=policies())
    def close_and_resume(self, policy):
        self.session.close()
        self.resume(policy)

    def resume(self, policy):
        self.open(policy, resume=True)
        self.members[-1].optimizer.load_state_dict(self.session.metadata["optimizer"])
        self.go_on_from(self.committed)

    @precondition(lambda self: self.committed is not None)
    @rule(
        data=st.data(),
        policy=policies(),
        operation=st.sampled_from(["read", "write"]),
        number=st.integers(0, 25) | st.integers(0, 90),
        waits=st.booleans(),
        goes_on=st.booleans(),
    )
    def fail_transfers(self, data, policy, operation, number, waits, goes_on):
        """What was not committed is lost; the session goes back, or the next one goes on."""
        failed = False
        with refusing(operation, number, waits=waits, goes_on=goes_on):
            for _ in range(3):
                failed = failed or self.try_step()
        note(f"failed: {failed}")
        if self.saved and data.draw(st.booleans()):
            self.load_saved(data)
            return
        with contextlib.suppress(OffloadError):
            self.session.close()
        self.resume(policy)

    def try_step(self):
        """Trains a step of the model alone; returns whether that failed."""
        try:
            for loss in self.at.architecture.losses(self.model, self.index):
                loss.backward(retain_graph=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
        except BudgetError:
            raise
        except OffloadError:
            return True
        return False

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
