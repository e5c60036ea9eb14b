"""Rules of random programs for what loops do seldom: see `SessionMachine`."""

import contextlib

import hypothesis.strategies as st
import torch
from hypothesis.stateful import rule
from parity.oracle import same_bits


class FurtherRules:
    """What a machine has to have: `losses`, `parameter`, `both`, `session`, `index`, `backward`."""

    def accumulating(self, model):
        """Returns what is around a backward of this model that is not the last of its step."""
        is_streamed = model is self.model
        return self.session.accumulating() if is_streamed else contextlib.nullcontext()

    @rule(backwards=st.booleans())
    def two_forwards_before_their_backwards(self, backwards):
        pairs = []
        for _ in range(2):
            pairs.append(self.losses())
            self.index += 1
            assert all(map(same_bits, *pairs[-1]))
        if backwards:
            pairs.reverse()
        for position, model in enumerate(self.both()):
            for number, each in enumerate(pairs):
                around = self.accumulating(model) if number == 0 else contextlib.nullcontext()
                with around:
                    for loss in each[position]:
                        loss.backward(retain_graph=True)

    @rule(data=st.data())
    def penalty_of_a_weight(self, data):
        _, parameters = self.parameter(data)
        for model, parameter in zip(self.both(), parameters, strict=True):
            with self.accumulating(model):
                parameter.float().square().sum().backward()

    @rule(data=st.data())
    def halve_gradients_as_they_appear(self, data):
        _, parameters = self.parameter(data)
        handles = [
            parameter.register_hook(lambda gradient: gradient * 0.5) for parameter in parameters
        ]
        self.backward(is_last=True, retains=False, autocast=False)
        for handle in handles:
            handle.remove()

    @rule(data=st.data(), num_steps=st.integers(1, 2))
    def train_without_one(self, data, num_steps):
        _, parameters = self.parameter(data)
        parameters = list(parameters)
        for parameter in parameters:
            parameter.requires_grad_(False)
        if any(parameter.requires_grad for parameter in self.reference.model.parameters()):
            for _ in range(num_steps):
                self.train_a_step()
        for parameter in parameters:
            parameter.requires_grad_(True)

    @rule()
    def infer(self):
        with torch.inference_mode():
            self.forward_alone()
