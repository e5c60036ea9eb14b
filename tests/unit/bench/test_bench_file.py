"""The memory of benchmarks of I/O."""

from pathlib import Path

from offload.bench.bench_file import BenchMemory


def permissions_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        span, permissions, *_ = line.split()
        start, stop = (int(number, 16) for number in span.split("-"))
        if start <= address < stop:
            return permissions
    raise AssertionError("the memory is not mapped")


def test_memory_is_private_so_that_huge_pages_do_not_depend_on_those_of_shared_memory():
    memory = BenchMemory(4 << 20)

    assert permissions_at(memory.bytes.ctypes.data) == "rw-p"
    assert memory.bytes.ctypes.data % (2 << 20) == 0
