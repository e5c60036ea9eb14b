"""Each backend of the I/O engine keeps the laws of the conformance class."""

import errno
from pathlib import Path

import numpy as np
import pytest

from offload._native import aio
from offload.errors import ConfigError, StorageError
from offload.sizes import MIB
from offload.storage.engine import BACKENDS, Engine, PathSettings
from offload.storage.faults import Fault, FaultPlan
from offload.storage.file import StorageFile
from offload.testing.io_conformance import IOConformance

needs_extension = pytest.mark.skipif(
    not aio.available(), reason=f"no compiled backend: {aio.unavailable_because()}"
)


def is_refused(name: str) -> bool:
    try:
        with Engine(name):
            return False
    except StorageError:
        return True


@needs_extension
class TestIoUring(IOConformance):
    def make_engine(self, **options: int) -> Engine:
        if is_refused("io_uring"):
            pytest.skip("no liburing, or the kernel refuses io_uring_setup here")
        return Engine("io_uring", **options)

    def test_the_kernel_is_told_of_direct_files_and_of_memory_beforehand(
        self, engine: Engine, direct_file: StorageFile
    ) -> None:
        memory = np.zeros(MIB + 4096, np.uint8)
        memory = memory[-memory.ctypes.data % 4096 :][:MIB]

        engine.write(direct_file, 0, memory).wait()
        engine.register(memory)
        engine.write(direct_file, 0, memory).wait()
        engine.unregister(memory)
        engine.write(direct_file, 0, memory).wait()

        (path,) = engine.path_stats()
        assert path.counters.registered_file_pieces == 3
        assert path.counters.registered_memory_pieces == 1

    def test_closing_the_engine_lets_go_of_files(self, direct_file: StorageFile) -> None:
        with self.make_engine() as engine:
            engine.write(direct_file, 0, np.zeros(0, np.uint8)).wait()
        with self.make_engine() as engine:
            engine.write(direct_file, 0, np.zeros(0, np.uint8)).wait()

        assert len(direct_file.before_close) == 2
        direct_file.close()
        assert not direct_file.before_close


@needs_extension
class TestLibaio(IOConformance):
    def make_engine(self, **options: int) -> Engine:
        if is_refused("libaio"):
            pytest.skip("the kernel refuses io_setup here")
        return Engine("libaio", **options)


@needs_extension
class TestThreads(IOConformance):
    def make_engine(self, **options: int) -> Engine:
        return Engine("threads", **options)


@needs_extension
class TestFault(IOConformance):
    """The laws hold too if many calls are short, interrupted or late."""

    faults = FaultPlan(
        seed=7,
        faults=(
            Fault(probability=0.1, error=errno.EINTR),
            Fault(probability=0.1, error=errno.EAGAIN),
            Fault(probability=0.2, max_bytes=4096),
            Fault(probability=0.01, delay_s=0.002),
        ),
    )

    def make_engine(self, **options: int) -> Engine:
        return Engine("fault", faults=self.faults, **options)


class TestAiofiles(IOConformance):
    def make_engine(self, **options: int) -> Engine:
        return Engine("aiofiles", **options)


@pytest.mark.parametrize("name", BACKENDS)
def test_engine_says_which_backend_it_uses(name):
    if is_refused(name):
        pytest.skip(f"`{name}` is not available here")
    engine = Engine(name)

    with engine:
        assert engine.name == name


def test_auto_takes_the_pure_backend_when_the_extension_is_switched_off(monkeypatch, caplog):
    monkeypatch.setenv("OFFLOAD_PURE", "1")
    monkeypatch.setattr("offload.storage.path_queues._logged", set())

    for _ in range(2):
        with Engine() as engine:
            assert engine.name == "aiofiles"

    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "OFFLOAD_PURE=1" in warnings[0].getMessage()


def test_a_named_backend_is_not_replaced_by_another(monkeypatch):
    monkeypatch.setenv("OFFLOAD_PURE", "1")

    with pytest.raises(StorageError, match="OFFLOAD_PURE"):
        Engine("threads").open()


@needs_extension
@pytest.mark.parametrize("name", ["io_uring", "libaio"])
def test_one_thread_serves_a_path_at_any_depth(tmp_path, name):
    if is_refused(name):
        pytest.skip("the kernel refuses it here")
    roots = [tmp_path / each for each in "abc"]
    paths = [PathSettings(root=root, backend=name, queue_depth=64) for root in roots]
    before = _num_engine_threads()

    with Engine(paths=paths):
        started = _num_engine_threads() - before

    assert started == len(paths)
    assert _num_engine_threads() == before


def _num_engine_threads() -> int:
    names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
    return sum(name.read_text() == "ofl-aio\n" for name in names)


@needs_extension
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EAGAIN])
def test_auto_takes_the_next_backend_when_the_kernel_refuses_one(monkeypatch, caplog, code):
    monkeypatch.setattr("offload.storage.path_queues._logged", set())
    opened = aio.Queue

    def refuse(name, **options):
        if name in ("io_uring", "libaio"):
            raise OSError(code, "refused")
        return opened(name, **options)

    monkeypatch.setattr(aio, "Queue", refuse)

    for _ in range(2):
        with Engine() as engine:
            assert engine.name == "threads"

    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].getMessage().count(errno.errorcode[code]) == 2


@pytest.mark.parametrize(
    "options",
    [{"backend": "fast"}, {"queue_depth": 0}, {"queue_depth": 5000}, {"block_bytes": 0}],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError):
        Engine(**options)
