"""Parameters that live on a device: updates change them in host memory, and copies follow."""

from collections.abc import Iterable, Mapping

import torch

from offload.devices import Copy, Device
from offload.layout import ModelLayout
from offload.memory import Region, memory_of


class DeviceParameters:
    """The flat shards of a model on a device, beside those in host memory that updates change.

    [Note: a step's copies to a device]
    Between steps the device's bytes are the parameters. A step's updates write those in host
    memory, which they read too, and what a record's update changed is copied up at once. So passes
    move no parameter, and a step moves each that it changed once. Nothing else is copied: what has
    no update is not hidden while others wait for theirs, and the user may change it meanwhile.

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
    ) -> None:
        """Cuts the region; there are no values in it yet.

        Args:
            layout: Of the model.
            host: The flat shards in host memory, by name, each padded to the transfer alignment.
            region: Device memory for all units, end to end.
            device: Where it is.
        """
        self.flat: dict[str, torch.Tensor] = {}
        self._host = host
        self._device = device
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

    def begin(self) -> None:
        """Makes host memory free to change; copies from now on follow what was computed so far."""
        for copies in self._sent:
            for copy in copies:
                copy.synchronize()
            copies.clear()
        self._device.note_uses(self._bases)

    def send(self, shard: str, start: int, stop: int) -> None:
        """Starts copying elements of a flat shard to the device."""
        flat, source = self.flat[shard], memory_of(self._host[shard])
        begin, end = start * flat.element_size(), stop * flat.element_size()
        into = flat.view(torch.uint8)[begin:end]
        copy = self._device.copy_in(source[begin:end], into)
        self._sent[self._unit_of[shard]].append(copy)

    def send_all(self) -> None:
        """Starts copying every parameter to the device."""
        for name, flat in self.flat.items():
            self.send(name, 0, len(flat))

    def wait(self, unit: int) -> None:
        """Orders what is computed from now on after the copies of a unit."""
        for copy in self._sent[unit]:
            copy.wait()

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
