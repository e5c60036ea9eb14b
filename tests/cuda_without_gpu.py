"""A CUDA runtime without a GPU: it does at once what it is asked, and notes what orders it.

Device memory is host memory. Each access to it is compared with those before: two of which one
writes must be ordered, by their stream, by events, or by the host, which waited between them. So a
missing order is found whether or not a GPU would have shown it. Of registered memory the host may
know as little as CUDA promises: what is copied out appears in it when the host waits for it, and
what is copied in is compared with what was there, until the host waits.
"""

import contextlib
import itertools
import threading
import weakref
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.optim.gradient import StreamedGradient
from offload.streaming.placeholders import placeholder_of as plain_placeholder_of

GRANULE = 64
"""Bytes that are looked at as one: what every parameter begins at a multiple of."""
MEMORY_BYTES = 1 << 30
OUT_OF_MEMORY = 2

aten = torch.ops.aten


def pretend(monkeypatch, *, tells=True):
    """Puts a runtime in the place of CUDA; returns it.

    Args:
        tells: Whether copies are over when they are asked; else they are when waited for.
    """
    runtime = Runtime(tells=tells)
    monkeypatch.setattr("offload.devices.cuda.torch", _Torch(runtime))
    monkeypatch.setattr("offload.devices.cuda._cuda", runtime)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: runtime.record_stream(*args))
    monkeypatch.setattr(torch.Tensor, "data", _data_of(runtime), raising=False)
    monkeypatch.setattr(torch.Tensor, "grad", _grad_of(runtime), raising=False)
    placeholders = "offload.streaming.placeholders"
    monkeypatch.setattr(f"{placeholders}.placeholder_of", _placeholders_of(runtime))
    monkeypatch.setattr(f"{placeholders}.memory_of", lambda _: None)  # the device has to tell
    return runtime


def _data_of(runtime):
    """`Tensor.data` between devices: as there, the node that accumulates gradients is made anew."""
    plain = torch._C.TensorBase.data

    def move(tensor, values):
        if tensor.requires_grad and runtime.has(tensor) != runtime.has(values):
            plain.__set__(tensor, torch.empty(0, dtype=torch.float64))  # another type does it
        plain.__set__(tensor, values)

    return property(plain.__get__, move)


def _grad_of(runtime):
    """`Tensor.grad` as there: a gradient that seems to be on the device is of no other tensor."""
    plain = torch._C.TensorBase.grad

    def show(tensor, gradient):
        is_elsewhere = tensor.numel() and not runtime.has(tensor)
        if isinstance(gradient, StreamedGradient) and is_elsewhere:
            raise RuntimeError("assigned a gradient on the device to a tensor on the CPU")
        plain.__set__(tensor, gradient)

    return property(plain.__get__, show, plain.__delete__)


def _placeholders_of(runtime):
    """Placeholders where they are said to be, or where the parameter is."""

    def placeholder_of(parameter, *, device=None):
        made = plain_placeholder_of(parameter, device=device)
        if made.numel() and (device is not None or runtime.has(parameter)):
            runtime.track(made)
        return made

    return placeholder_of


class Stream:
    """Work in order. `clock` says up to where each stream is before what comes next here."""

    _numbers = itertools.count()

    def __init__(self, runtime):
        self.name = f"stream {next(self._numbers)}"
        self.clock = {}
        self._runtime = runtime

    def wait_event(self, event):
        with self._runtime.lock:
            merge(self.clock, event.clock)

    def wait_stream(self, other):
        with self._runtime.lock:
            merge(self.clock, other.clock)

    def synchronize(self):
        self._runtime.host_waits(self.clock)


class Event:
    """What a stream had been given when it was recorded."""

    def __init__(self, runtime):
        self.clock = {}
        self._runtime = runtime

    def record(self, stream):
        with self._runtime.lock:
            self.clock = dict(stream.clock)

    def synchronize(self):
        self._runtime.host_waits(self.clock)

    def query(self):
        if self._runtime.tells:
            self._runtime.host_waits(self.clock)
        return is_before(self.clock, self._runtime.known)


def merge(clock, other):
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def is_before(clock, other):
    return all(other.get(stream, 0) >= number for stream, number in clock.items())


@dataclass
class Accesses:
    """Of one granule: the last write and the reads since then, by stream."""

    write: tuple | None = None
    reads: dict = field(default_factory=dict)


@dataclass
class Region:
    """Device memory that torch gave, and the streams that it was recorded for."""

    start: int
    stop: int
    recorded: set = field(default_factory=set)


@dataclass
class HostCopy:
    """The host's end of a copy that the host does not know to be over."""

    stream: Stream
    number: int
    memory: np.ndarray
    brought: bytes | None = None
    """What a copy out brings."""
    digest: int = 0
    """Of what a copy in reads."""


class Runtime:
    """Takes the place of `torch.cuda`.

    Attributes:
        races: What was not ordered.
        known: Up to where the host knows each stream to be.
        registered: Bytes of host memory, by address.
        fails_at: The number of the registration that fails, from 1.
        captures: Whether a graph is captured.
    """

    def __init__(self, *, tells):
        self.lock = threading.RLock()
        self.tells = tells
        self.races = []
        self.known = {}
        self.registered = {}
        self.num_registrations = 0
        self.fails_at = None
        self.launched = 0
        self.captures = False
        self._error = 0
        self._default = Stream(self)
        self._local = threading.local()
        self._regions = {}
        self._accesses = {}
        self._host_copies = []

    # As torch.cuda has it.

    def Stream(self, device):  # noqa: N802
        return Stream(self)

    def Event(self):  # noqa: N802
        return Event(self)

    @contextlib.contextmanager
    def stream(self, stream):
        before, outer = self.current_stream(), getattr(self._local, "outer", None)
        self._local.stream, self._local.outer = stream, before
        try:
            with self.watching():
                yield
        finally:
            self._local.stream, self._local.outer = before, outer

    def current_stream(self, device=None):
        return getattr(self._local, "stream", self._default)

    def synchronize(self, device):
        with self.lock:
            clock = dict(self._default.clock)
            for copy in self._host_copies:
                merge(clock, copy.stream.clock)
        self.host_waits(clock)

    def device(self, device):
        return contextlib.nullcontext()

    def is_available(self):
        return True

    def is_current_stream_capturing(self):
        return self.captures

    def current_device(self):
        return 0

    def mem_get_info(self, device):
        used = sum(region.stop - region.start for region in self._regions.values())
        return MEMORY_BYTES - used, MEMORY_BYTES

    def cudart(self):
        return self

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        assert flags == 1
        self.num_registrations += 1
        if self.num_registrations == self.fails_at:
            self._error = OUT_OF_MEMORY
            return OUT_OF_MEMORY
        with self.lock:
            assert not any(
                start < address + num_bytes and address < start + size
                for start, size in self.registered.items()
            ), "registered twice"
            self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        with self.lock:
            num_bytes = self.registered.pop(address)
            for copy in self._host_copies:
                if address <= copy.memory.ctypes.data < address + num_bytes:
                    self.races.append("host memory was unregistered under a copy")
        return 0

    def record_stream(self, tensor, stream):
        if tensor.numel():
            self.track(tensor).recorded.add(stream)

    # What the tests use.

    @contextlib.contextmanager
    def watching(self):
        """Looks at what this thread computes."""
        if getattr(self._local, "is_watching", False):
            yield
            return
        self._local.is_watching = True
        try:
            with _Watch(self):
                yield
        finally:
            self._local.is_watching = False

    @contextlib.contextmanager
    def computing_in(self, stream):
        """Computes in another stream, which the host has made wait for the one before."""
        stream.wait_stream(self.current_stream())
        with self.stream(stream):
            yield
        self.current_stream().wait_stream(stream)

    def launch(self):
        """Begins a kernel, which is told of an error that nobody took notice of."""
        self.launched += 1
        error, self._error = self._error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")

    # What happens.

    def host_waits(self, clock):
        with self.lock:
            merge(self.known, clock)
            over = [c for c in self._host_copies if self.known.get(c.stream, 0) >= c.number]
            self._host_copies = [c for c in self._host_copies if c not in over]
            for copy in over:
                if copy.brought is not None:
                    copy.memory[:] = np.frombuffer(copy.brought, np.uint8)
                elif xxhash.xxh3_64_intdigest(copy.memory) != copy.digest:
                    self.races.append("host memory changed under a copy that reads it")

    def track(self, tensor, *, was_used=False):
        """Follows the memory under a tensor until its storage dies."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        with self.lock:
            for region in self._regions.values():
                if region.start <= start < region.stop:
                    return region
            region = self._regions[start] = Region(start, start + storage.nbytes())
            weakref.finalize(storage, self._give_back, region).atexit = False
            if was_used:  # as far as torch tells: by work before now on this stream
                self._access(tensor, self.current_stream(), self._begin(), writes=True)
            return region

    def run(self, func, args, kwargs):
        stream = self.current_stream()
        if func is aten.copy_.default and stream is not self._default and self._is_copy(*args[:2]):
            return self._copy(stream, func, args, kwargs)
        if not func.is_view:
            used = [t for t in tree_leaves((args, kwargs)) if self.has(t)]
            written = _written(func, args, kwargs)
            self.launch()
            with self.lock:
                number = self._begin()
                for tensor in used:
                    self._access(tensor, stream, number, writes=id(tensor) in written)
        return func(*args, **kwargs)

    def _copy(self, stream, func, args, kwargs):
        into, source = args[:2]
        is_blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        self.launch()
        with self.lock:
            number = self._begin()
            is_in = self.has(into)
            on_device, on_host = (into, source) if is_in else (source, into)
            if not is_in and not self.has(source):
                self.track(source)  # what was computed last may have written it
                outer = self._local.outer
                self._access(source, outer, outer.clock.get(outer, 0), writes=True)
            self._access(on_device, stream, number, writes=is_in)
            if is_blocking or not self._is_registered(on_host):
                func(*args, **kwargs)
                if not is_in:  # else it has left the host's memory, and no more
                    self.host_waits(stream.clock)
                return into
            copy = HostCopy(stream, number, _bytes(on_host))
            self._host_copies.append(copy)
            if is_in:
                copy.digest = xxhash.xxh3_64_intdigest(copy.memory)
                return func(*args, **kwargs)
            copy.brought = _bytes(source.contiguous()).tobytes()
            return into

    def _begin(self):
        stream = self.current_stream()
        merge(stream.clock, self.known)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        return stream.clock[stream]

    def _access(self, tensor, stream, number, *, writes):
        for granule in _granules(tensor):
            found = self._accesses.setdefault(granule, Accesses())
            before = [] if found.write is None else [found.write]
            if writes:
                before += found.reads.items()
            for other, its_number in before:
                if stream.clock.get(other, 0) < its_number:
                    what = "write to" if writes else "read of"
                    self.races.append(f"{what} {tensor.shape} in {stream.name}, not {other.name}'s")
                    return
            if writes:
                found.write, found.reads = (stream, number), {}
            else:
                found.reads[stream] = number

    def _give_back(self, region):
        """Memory that torch gives anew: other streams must have been recorded, or be over."""
        with self.lock:
            del self._regions[region.start]
            for granule in range(region.start // GRANULE, -(-region.stop // GRANULE)):
                found = self._accesses.pop(granule, None)
                if found is None:
                    continue
                for stream, number in [*found.reads.items(), *filter(None, [found.write])]:
                    is_safe = stream is self._default or stream in region.recorded
                    if not is_safe and self.known.get(stream, 0) < number:
                        self.races.append(f"memory was given back that {stream.name} uses")
                        return

    def _is_copy(self, into, source):
        return self.has(into) != self.has(source) or not self.has(into)

    def has(self, value):
        """Whether it is a tensor in the device's memory."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return False
        if value.layout is not torch.strided or not value.numel():
            return False
        start = value.data_ptr()
        with self.lock:
            return any(r.start <= start < r.stop for r in self._regions.values())

    def _is_registered(self, tensor):
        start, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for address, size in self.registered.items():
            if address <= start < address + size:
                assert start + num_bytes <= address + size, "a copy over two registrations"
                return True
        return False


class _Watch(TorchDispatchMode):
    def __init__(self, runtime):
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._runtime.run(func, args, kwargs or {})


class _Torch:
    """torch as `offload.devices.cuda` sees it."""

    def __init__(self, runtime):
        self.cuda = runtime

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, kind, index):
        return torch.device("cpu")

    def zeros(self, size, *, device):
        self.cuda.launch()

    def empty(self, num_bytes, *, dtype, device):
        if num_bytes > self.cuda.mem_get_info(device)[0]:
            raise torch.OutOfMemoryError("out of memory")
        region = torch.empty(num_bytes, dtype=dtype)
        if num_bytes:
            self.cuda.track(region, was_used=True)
        return region

    def as_tensor(self, owner, *, device):
        owner.__array_interface__ = owner.__cuda_array_interface__
        return torch.from_numpy(np.asarray(owner))


def _bytes(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _granules(tensor):
    """The granules between a tensor's first and last byte."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    stop = start + (last + 1) * tensor.element_size()
    return range(start // GRANULE, -(-stop // GRANULE))


def _written(func, args, kwargs):
    """The ids of the tensors that an operation writes."""
    written = set()
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            written.update(id(leaf) for leaf in tree_leaves(value))
    return written
