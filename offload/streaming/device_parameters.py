"""Parameters that live on a device: updates change them in host memory, and copies follow."""

from collections.abc import Iterable, Mapping

import torch

from offload.devices import Copy, Device
from offload.layout import FlatShard, ModelLayout, PlacedParameter
from offload.memory import Region, memory_of
from offload.plan.device import sum_columns
from offload.streaming.byte_sums import ByteSums
from offload.streaming.link_waits import LinkWaits


class DeviceParameters:
    """The flat shards of a model on a device, beside those in host memory that updates change.

    [Note: a step's copies to a device]
    Between steps the device's bytes are the parameters. A step's updates write those in host
    memory, which they read too, and what a record's update changed is copied up at once. So passes
    move no parameter, and a step moves each that it changed once. Nothing else is copied: what has
    no update is not hidden while others wait for theirs, and the user may change it meanwhile.

    [Note: edits that no counter shows]
    Users write through `parameter.data`, which moves no version counter. In host memory such an
    edit would simply be there; here the next copy would undo it. So when the copies of a shard have
    arrived the device sums its bytes, and sums them again before the next step or commit: two reads
    of them each time. Where sums differ, or where a step changed only a part of the shard, its
    parameters are brought down and compared.

    Attributes:
        flat: The shards on the device, by name, 1-D.

    Ownership: From `send` to the next `begin` host and device memory belong to the copies.
    Concurrency: `send` in the thread that updates; the rest in the one that runs the model.
    """

    def __init__(
        self,
        layout: ModelLayout,
        host: Mapping[str, torch.Tensor],
        *,
        region: Region,
        device: Device,
        link_waits: LinkWaits,
    ) -> None:
        """Cuts the region; there are no values in it yet.

        Args:
            layout: Of the model.
            host: The flat shards in host memory, by name, each padded to the transfer alignment.
            region: Device memory for all units, end to end.
            device: Where it is.
            link_waits: Counts waits for copies to it.
        """
        self.flat: dict[str, torch.Tensor] = {}
        self._host = host
        self._device = device
        self._link_waits = link_waits
        self._layout = layout
        self._bases: list[torch.Tensor] = []
        self._unit_of: dict[str, int] = {}
        offset = 0
        for number, unit in enumerate(layout.units):
            base = device.tensor_over(region[offset : offset + unit.num_bytes])
            offset += unit.num_bytes
            self._bases.append(base)
            for shard in unit.shards:
                memory = base[shard.offset_bytes : shard.offset_bytes + shard.num_bytes]
                self.flat[shard.name] = memory.view(getattr(torch, shard.dtype))
                self._unit_of[shard.name] = number
        self._sent: list[list[Copy]] = [[] for _ in layout.units]
        largest_bytes = max((shard.padded_bytes for shard in layout.shards.values()), default=0)
        self._byte_sums = ByteSums(sum_columns(largest_bytes), device.torch_device)
        # Of each shard, by its number, as it was last known to be what host memory has.
        self._number_of = {name: number for number, name in enumerate(self.flat)}
        self._sums = torch.zeros(len(self.flat), dtype=torch.int64, device=device.torch_device)
        self._found = torch.zeros_like(self._sums)
        # The shards of which it is known; the others are to be compared.
        self._summed: set[str] = set()
        # Of each shard: elements of parameters, and how many of them this step has sent.
        self._num_elements = {
            name: sum(placed.facts.num_elements for placed in shard.parameters)
            for name, shard in layout.shards.items()
        }
        self._num_sent = dict.fromkeys(self.flat, 0)

    def begin(self) -> None:
        """Makes host memory free to change; copies from now on follow what was computed so far."""
        for copies in self._sent:
            for copy in copies:
                copy.wait()  # after a step that failed nobody else has
                copy.synchronize()
            copies.clear()
        self._num_sent = dict.fromkeys(self.flat, 0)
        self._device.note_uses(self._bases)

    def send(self, shard: str, start: int, stop: int) -> None:
        """Starts copying elements of a flat shard to the device."""
        flat, source = self.flat[shard], memory_of(self._host[shard])
        begin, end = start * flat.element_size(), stop * flat.element_size()
        into = flat.view(torch.uint8)[begin:end]
        copy = self._device.copy_in(source[begin:end], into)
        self._sent[self._unit_of[shard]].append(copy)
        self._summed.discard(shard)
        self._num_sent[shard] += sum(
            max(min(stop, placed.stop) - max(start, placed.start), 0)
            for placed in self._layout.shards[shard].parameters
        )

    def send_all(self) -> None:
        """Starts copying every parameter to the device."""
        for name, flat in self.flat.items():
            self.send(name, 0, len(flat))

    def wait(self, unit: int) -> None:
        """Orders what is computed from now on after the copies of a unit."""
        with self._link_waits.waiting("copying what an update changed"):
            for copy in self._sent[unit]:
                copy.wait()
        for shard in self._layout.units[unit].shards:
            is_whole = self._num_sent[shard.name] == self._num_elements[shard.name]
            if is_whole and shard.name not in self._summed:
                self._sum(shard, self._sums)
                self._summed.add(shard.name)

    def wait_all(self) -> None:
        """As `wait`, for every unit."""
        for unit in range(len(self._sent)):
            self.wait(unit)

    def bring(self, names: Iterable[str]) -> None:
        """Copies parameters that the user changed on the device to host memory, and waits."""
        copies: list[Copy] = []
        for name in names:
            shard, placed = self._layout.parameters[name]
            part = slice(placed.start, placed.stop)
            source, into = self.flat[shard.name][part], self._host[shard.name][part]
            copies.append(self._device.copy_out(source, into))
        for copy in copies:
            copy.synchronize()

    def changed(self) -> list[str]:
        """Returns the parameters whose bytes on the device are not those in host memory.

        What was sent must have arrived. Those that differ are found again until they are brought.
        See [Note: edits that no counter shows].
        """
        found: list[str] = []
        for shard in self._layout.shards.values():
            self._sum(shard, self._found)
        are_same = (self._found == self._sums).tolist()
        for shard in self._layout.shards.values():
            number = self._number_of[shard.name]
            if shard.name in self._summed and are_same[number]:
                continue
            differing = [p.facts.name for p in shard.parameters if self._differs(shard, p)]
            if differing:
                self._summed.discard(shard.name)
            else:
                self._sums[number].copy_(self._found[number])
                self._summed.add(shard.name)
            found += differing
        return found

    def _differs(self, shard: FlatShard, placed: PlacedParameter) -> bool:
        part = slice(placed.start, placed.stop)
        found, known = self.flat[shard.name][part].cpu(), self._host[shard.name][part]
        return not torch.equal(found.view(torch.uint8), known.view(torch.uint8))

    def _sum(self, shard: FlatShard, into: torch.Tensor) -> None:
        base, start = self._bases[self._unit_of[shard.name]], shard.offset_bytes
        memory = base[start : start + shard.padded_bytes]
        self._byte_sums.sum_into(memory, into[self._number_of[shard.name]])
