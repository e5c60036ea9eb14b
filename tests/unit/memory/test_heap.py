"""The C library's heap: what a build leaves of it. In processes of their own, as it is global."""

import ctypes
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import offload
from offload.memory import heap

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or newer"
)

HEAP = Path(offload.__file__).parent / "memory" / "heap.py"
PROGRAM = """
import ctypes, runpy, sys
large_blocks_mapped = runpy.run_path(sys.argv[1])["large_blocks_mapped"]  # without torch

class Info(ctypes.Structure):
    _fields_ = [(f"field{index}", ctypes.c_size_t) for index in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p

def heap_bytes():
    return libc.mallinfo2().field0

def take(num_bytes, count):
    return [ctypes.c_void_p(libc.malloc(num_bytes)) for _ in range(count)]

for block in take(16 << 20, 1):  # now glibc keeps blocks of up to 16 MiB in the heap
    libc.free(block)
before = heap_bytes()
with large_blocks_mapped():
    kept = take(4 << 20, 8)
inside = heap_bytes()
kept += take(4 << 20, 8)
print(inside - before, heap_bytes() - inside)
"""


def growth_of_heap(**environment: str) -> tuple[int, int]:
    """Returns the bytes by which 32 MiB in blocks of 4 let the heap grow: inside, then outside."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(HEAP)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    inside, outside = done.stdout.split()
    return int(inside), int(outside)


def test_large_blocks_of_the_context_are_not_in_the_heap_and_later_ones_are() -> None:
    inside, outside = growth_of_heap()

    assert inside < 1 << 20
    assert outside >= 24 << 20  # what was free before is used first


HOLES = """
import ctypes, runpy, sys
from pathlib import Path
limit = runpy.run_path(sys.argv[1])["HeapHoles"]().limit

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t

def take(count, kilobytes):
    blocks = [libc.malloc(kilobytes << 10) for _ in range(count)]
    for block in blocks:
        libc.memset(block, 1, kilobytes << 10)
    return blocks

def free(blocks):
    for block in blocks:
        libc.free(ctypes.c_void_p(block))

def note(limit_bytes):
    print(int(limit(limit_bytes)), resident_bytes() - base)

limit(1 << 20)  # knows what else is resident
kept = take(200, 100)
base = resident_bytes()
limit(1 << 20)  # and how much was in use
free(kept[::2])
note(1 << 20)
larger = take(50, 200)  # which no hole fits
note(64 << 20)
note(1 << 20)
note(1 << 20)
"""


def test_holes_go_back_to_the_kernel_once_the_heap_has_grown_for_want_of_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES, str(HEAP)], capture_output=True, text=True, check=True
    )

    found = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert [was_trimmed for was_trimmed, _ in found] == [0, 0, 1, 0]
    freed, grown, trimmed, _ = (num_bytes for _, num_bytes in found)
    assert abs(freed) < 1 << 20  # not more than was in use at one time
    assert grown > 9 << 20  # of 10 MB in blocks of 200 KiB
    assert trimmed < 1 << 20


class CountedHeap:
    """A C library that counts for how often it was asked; sizes in MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.resident, self.num_walks = 100, 150, 0
        monkeypatch.setattr(heap, "_function", lambda name: partial(getattr(self, name)))
        monkeypatch.setattr(heap, "_resident_bytes", lambda: self.resident << 20)

    def mallinfo2(self) -> SimpleNamespace:
        self.num_walks += 1
        return SimpleNamespace(uordblks=self.used << 20)

    def malloc_trim(self, pad: int) -> int:
        self.num_walks += 1
        return 0  # nothing was free


def test_the_heap_is_walked_only_when_more_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    found, holes = CountedHeap(monkeypatch), heap.HeapHoles()
    holes.limit(8 << 20)
    num_before = found.num_walks

    for _ in range(100):
        found.used -= 1
        holes.limit(8 << 20)

    assert found.num_walks == num_before


def test_memory_elsewhere_has_the_heap_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, holes = CountedHeap(monkeypatch), heap.HeapHoles()
    holes.limit(8 << 20)
    found.resident += 64
    num_before = found.num_walks

    for _ in range(100):
        holes.limit(8 << 20)

    assert found.num_walks == num_before + 2


@pytest.mark.parametrize("environment", [
    {"MALLOC_MMAP_THRESHOLD_": str(8 << 20)},
    {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={8 << 20}"},
])  # fmt: skip
def test_a_threshold_of_the_users_stays(environment: dict[str, str]) -> None:
    inside, outside = growth_of_heap(**environment)

    assert inside >= 24 << 20
    assert outside >= 24 << 20


def test_what_the_user_trims_at_stays() -> None:
    freed = """
for block in kept[8:]:  # the end of the heap
    libc.free(block)
print(heap_bytes() - inside)
"""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + freed, str(HEAP)],
        env={**os.environ, "MALLOC_TRIM_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        check=True,
    )

    grown, left = done.stdout.splitlines()
    assert int(grown.split()[1]) >= 24 << 20
    assert int(left) < 4 << 20
