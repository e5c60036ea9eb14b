"""A chain of layers over a tier in memory, and what its residency asks of it, in order.

Four units, used in the order 0 1 2 3 and, in backward, 3 2 1: the input needs no gradient, so
nothing asks for the weight of unit 0. An event names what is asked of the tier or leaves a slot:
`fetch N` (needed now), `prefetch N` (ahead of use), `evict N`, `write N`; `use N` is a call.
"""

import torch
from torch import nn

from offload.layout import UnitFacts, build_layout
from offload.memory import Budget, SlotPool, memory_of
from offload.storage.stalls import StallAccount
from offload.streaming.discovery import discover_units
from offload.streaming.model import StreamedModel
from offload.streaming.residency import Residency
from offload.streaming.unit import StreamedUnit

WIDTH = 64


class FakeTier:
    """Keeps units in memory and notes what is read, in order; a copy is complete at once.

    `parts` names what a transfer is in flight on, one after the other.
    """

    def __init__(self, events, device):
        self.events = events
        self.device = device
        self.stored = {}
        self.parts = ["path"]

    def can_prefetch(self):
        return True

    def bytes_from_update(self, unit):
        return 0

    def wait_readable(self, unit):
        pass

    def raise_failure(self):
        pass

    def wait_updated(self, transfers):
        pass

    def settle(self):
        pass

    def waits_for(self, transfers):
        return self.parts[0]

    def wait_part(self, transfers):
        if len(self.parts) == 1:
            return False
        self.events.append(f"wait {self.parts.pop(0)}")
        return True

    def start_read(self, unit, into, *, is_prefetch):
        self.events.append(f"{'prefetch' if is_prefetch else 'fetch'} {unit.name}")
        copy = self.device.copy_in(memoryview(self.stored[unit.name]), into)
        copy.synchronize()
        return [copy]

    def write(self, unit, source):
        self.events.append(f"write {unit.name}")
        self.stored[unit.name] = bytes(memory_of(source))


class Chain(nn.Module):
    """Layers in a list; `skipped` ones are left out, `repeated` ones are called twice."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.skipped = set()
        self.repeated = set()
        self.order = range(layers)

    def forward(self, x):
        for index in self.order:
            layer = self.layers[index]
            if index not in self.skipped:
                x = layer(x)
            if index in self.repeated:
                x = layer(x)
        return x


class Harness:
    """A chain over a fake tier, and the events of what it does."""

    device = None

    def __init__(self, *, slots, distance=2, layers=4):
        torch.manual_seed(0)
        self.events = []
        self.model = Chain(layers)
        self.tier = tier = FakeTier(self.events, self.device)
        self.stalls = StallAccount()
        discovered = discover_units(self.model)
        for unit in discovered.units:
            unit.facts = UnitFacts(name=unit.facts.name[-1], parameters=unit.facts.parameters)
        layout = build_layout([u.facts for u in discovered.units], codec="split")
        slot_bytes = layout.units[0].num_bytes
        memory = self.device.allocate(slots * slot_bytes)
        budget = Budget(slots * slot_bytes, tier="host")
        self.pool = SlotPool(memory, slot_bytes=slot_bytes, budget=budget, purpose="slots")
        parameters = {n: p for u in discovered.units for n, p in u.parameters.items()}
        units = [StreamedUnit(unit, i, parameters) for i, unit in enumerate(layout.units)]
        for unit in units:
            stored = torch.zeros(unit.layout.num_bytes, dtype=torch.uint8)
            for binding in unit.bindings:
                stop = binding.offset_bytes + binding.num_bytes
                values = binding.parameter.detach().view(-1).view(torch.uint8)
                stored[binding.offset_bytes : stop] = values
            unit.begin()
            tier.stored[unit.name] = bytes(stored.numpy())
        self.residency = Recorded(
            self.events,
            units,
            pool=self.pool,
            tier=tier,
            prefetch_distance=distance,
            on_edit=lambda edits: None,
            device=self.device,
            stalls=self.stalls,
        )
        self.streamed = StreamedModel(
            self.model,
            discovered,
            self.residency,
            require_usable=lambda: None,
            on_error=lambda _: None,
            on_pass=lambda: None,
        )
        self.streamed.open()
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self._note_use)

    def forward(self, *, needs_gradient=False):
        return self.model(torch.ones(1, WIDTH, requires_grad=needs_gradient)).sum()

    def take(self):
        taken = list(self.events)
        self.events.clear()
        return taken

    def update(self):
        """What the engine does around an update."""
        self.residency.evict_all()
        self.events.append("update")
        self.streamed.after_update()

    def step(self):
        self.forward().backward()
        self.update()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            self.forward()
        self.model.train()

    def _note_use(self, layer, _):
        index = list(self.model.layers).index(layer)
        self.events.append(f"use {index}")


class Recorded(Residency):
    """A residency that notes what leaves its slots."""

    def __init__(self, events, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.events = events

    def evict(self, unit):
        if unit.base is not None:
            self.events.append(f"evict {unit.name}")
        super().evict(unit)
