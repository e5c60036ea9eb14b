"""What random programs are made of: policies, the models of a session, and a store that refuses."""

import contextlib
import copy
import itertools
from unittest import mock

import hypothesis.strategies as st
import torch
from parity.oracle import Reference, same_bits

from offload.errors import StorageError
from offload.storage.store import BlockStore

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
GENEROUS = 8 << 20


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


class Member:
    """One model of the session, and what it should be.

    Attributes:
        before_edits: By name: values and master as the last update or commit left them, where the
            program has edited the values through `.data` since.
    """

    def __init__(self, name, architecture, dtype, gradient_dtype):
        self.name = name
        self.architecture = architecture
        self.dtype = dtype
        self.gradient_dtype = gradient_dtype
        self.model = self.optimizer = None
        self.lr = OPTIONS["lr"]
        self.go_on_from(Reference(self.build(), **OPTIONS))

    def build(self):
        return self.architecture.build(self.dtype)

    def both(self):
        return self.model, self.reference.model

    def go_on_from(self, reference):
        self.reference = copy.deepcopy(reference)
        self.reference.options["lr"] = self.lr
        self.before_edits = {}
        if self.gradient_dtype == "float32":
            for parameter in self.reference.trainable.values():
                parameter.grad_dtype = torch.float32

    def wrap(self, session, **parts):
        name = {"name": self.name} if self.name else {}
        self.model = session.wrap(self.build(), **name, **parts)
        names = list(self.reference.trainable)
        groups = [
            {"params": [self.model.get_parameter(name) for name in some]}
            for some in (names[::2], names[1::2])
            if some
        ]
        self.optimizer = session.AdamW(groups, **OPTIONS)
        self.set_lr(self.lr)

    def set_lr(self, lr):
        """Sets that of the first param_group; the second one's is three times that."""
        self.lr = self.reference.options["lr"] = lr
        for group, factor in zip(self.optimizer.param_groups, (1, 3), strict=False):
            group["lr"] = factor * lr
        self.reference.lr_of = dict.fromkeys(list(self.reference.trainable)[1::2], 3 * lr)

    def is_edited(self, name):
        self.before_edits.pop(name, None)
        self.reference.edited(name)

    def require_equal_state(self, session):
        digest = session.state_digest(self.name) if self.name else session.state_digest()
        assert digest == self.reference.digest()
        expected = self.reference.model.state_dict()
        for name, values in self.model.state_dict().items():
            assert same_bits(values, expected[name]), name
        self.before_edits.clear()


def refusing(operation, number, *, waits, goes_on):
    """Has stores refuse the read or write of this number, or when it is waited for.

    Args:
        operation: `"read"` or `"write"`.
        number: From 0.
        waits: Whether it is refused when it is over.
        goes_on: Whether all that follow are refused, too.
    """
    counter = itertools.count()

    def fail(*_):
        raise StorageError("what was refused")

    def refused(plain):
        def start(*args, **options):
            count = next(counter)
            if count < number or (count > number and not goes_on):
                return plain(*args, **options)
            if not waits:
                fail()
            ticket = plain(*args, **options)
            wait = ticket.wait
            ticket.wait = lambda *how: fail(wait(*how))
            return ticket

        return start

    patches = contextlib.ExitStack()
    for name in ("read",) if operation == "read" else ("write", "write_staged"):
        plain = getattr(BlockStore, name)
        patches.enter_context(mock.patch.object(BlockStore, name, refused(plain)))
    return patches
