"""What the kernel or a container refuses: system calls, descriptors, locked memory, directness."""

import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from offload._native import aio
from offload.storage.engine import Engine

NUMBERS = {
    "x86_64": {"io_uring_setup": 425, "io_setup": 206},
    "aarch64": {"io_uring_setup": 425, "io_setup": 0},
}
REFUSE = """
import ctypes, struct

def refuse(calls):
    # A filter as container runtimes install it: these calls fail, the rest is allowed.
    parts = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # load the number of the call
    for number, code in calls.items():
        parts.append(struct.pack("HBBI", 0x15, 0, 1, number))  # is it this one?
        parts.append(struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | code))
    parts.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(b"".join(parts))
    head = struct.pack("HxxxxxxQ", len(parts), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(head), 0, 0) == 0, ctypes.get_errno()
"""
MOVE = """
import json, logging, sys
from pathlib import Path
import numpy as np
from offload.storage.engine import Engine
from offload.storage.file import open_file

logging.basicConfig(stream=sys.stderr, level=logging.WARNING)

def move(path, **options):
    file = open_file(Path(path), create=True)
    memory = np.zeros(3 << 20, np.uint8)
    start = -memory.ctypes.data % 4096
    written, found = memory[start:][: 1 << 20], memory[start + (1 << 20) :][: 1 << 20]
    written[:] = np.arange(1 << 20) % 251
    with Engine(**options) as engine:
        is_registered = engine.register(memory)
        engine.write(file, 0, written).wait(60)
        engine.read(file, 0, found).wait(60)
        engine.flush(file)
        name = engine.name
    file.close()
    assert (written == found).all()
    print(json.dumps({"name": name, "is_registered": is_registered}))
"""

needs_extension = pytest.mark.skipif(
    not aio.available(), reason=f"no compiled backend: {aio.unavailable_because()}"
)
needs_filter = pytest.mark.skipif(
    platform.machine() not in NUMBERS, reason="the numbers of system calls are not known here"
)


def run_python(code, **options):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def numbers(*names):
    known = NUMBERS[platform.machine()]
    return [known[name] for name in names]


@needs_extension
@needs_filter
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_container_that_forbids_io_uring_gets_the_next_backend(tmp_path, code):
    calls = dict.fromkeys(numbers("io_uring_setup"), code)

    found, log = run_python(f"{REFUSE}{MOVE}refuse({calls})\nmove({str(tmp_path / 'f')!r})")

    assert found["name"] == "libaio"
    assert log.count("WARNING") == 1
    assert "io_uring" in log


@needs_extension
@needs_filter
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EAGAIN])
def test_without_both_interfaces_of_the_kernel_threads_are_used(tmp_path, code):
    calls = dict.fromkeys(numbers("io_uring_setup", "io_setup"), code)

    found, log = run_python(f"{REFUSE}{MOVE}refuse({calls})\nmove({str(tmp_path / 'f')!r})")

    assert found["name"] == "threads"
    assert log.count("WARNING") == 1
    assert log.count(errno.errorcode[code]) >= 1


@needs_extension
@needs_filter
def test_a_named_backend_that_is_refused_is_an_error(tmp_path):
    calls = dict.fromkeys(numbers("io_uring_setup"), errno.EPERM)
    code = (
        f"{REFUSE}{MOVE}refuse({calls})\n"
        "from offload.errors import StorageError\n"
        f"try: move({str(tmp_path / 'f')!r}, backend='io_uring')\n"
        "except StorageError as error:\n"
        "    print(json.dumps({'errno': error.errno, 'text': str(error)}))"
    )

    found, _ = run_python(code)

    assert found["errno"] in (errno.EPERM, errno.EOPNOTSUPP)
    assert "io_uring" in found["text"]


@needs_extension
def test_low_limits_on_locked_memory_and_descriptors_are_enough(tmp_path):
    limits = (
        "import ctypes, resource\n"
        # Root may lock any amount: give that right up, then the limit counts.
        "ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
    )

    found, _ = run_python(f"{MOVE}{limits}move({str(tmp_path / 'f')!r}, queue_depth=64)")

    assert found["name"] in ("io_uring", "libaio", "threads")


@needs_extension
def test_too_few_descriptors_are_an_error_that_says_so(tmp_path):
    code = (
        f"{MOVE}"
        "import os, resource\n"
        "from offload.errors import StorageError\n"
        "with Engine('libaio'): pass\n"  # loads the extension
        "used = len(os.listdir('/proc/self/fd'))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, used - 1))\n"
        "try: Engine('libaio').open()\n"
        "except StorageError as error:\n"
        "    print(json.dumps({'errno': error.errno, 'text': str(error)}))"
    )

    found, _ = run_python(code)

    assert found["errno"] == errno.EMFILE
    assert "open files" in found["text"]


def test_without_the_extension_the_pure_backend_moves_the_same_bytes(tmp_path):
    found, log = run_python(
        f"{MOVE}move({str(tmp_path / 'f')!r})", env={**os.environ, "OFFLOAD_PURE": "1"}
    )

    assert found == {"name": "aiofiles", "is_registered": False}
    assert "OFFLOAD_PURE=1" in log


@pytest.mark.slow
@pytest.mark.alone  # two that look for a free loop device may find the same
@pytest.mark.parametrize("sector_bytes", [512, 4096])
@pytest.mark.parametrize("backend", ["io_uring", "libaio", "threads", "aiofiles"])
def test_devices_of_both_sector_sizes_are_written_directly(tmp_path, sector_bytes, backend):
    try:
        with Engine(backend):
            pass
    except OSError as error:
        pytest.skip(f"`{backend}` is not available here: {error}")
    with _Loop(tmp_path, sector_bytes) as root:
        code = (
            f"{MOVE}move({str(root / 'f')!r}, backend={backend!r}, block_bytes=65536)\n"
            f"file = open_file(Path({str(root / 'f')!r}))\n"
            "print(file.alignment, file.is_direct, file=sys.stderr)\n"
        )
        found, log = run_python(code)

    assert found["name"] == backend
    alignment, is_direct = log.split()[-2:]
    assert is_direct == "True"
    assert int(alignment) % sector_bytes == 0


class _Loop:
    """A mounted ext4 on a loop device with that logical block size; skips where not allowed."""

    def __init__(self, directory: Path, sector_bytes: int) -> None:
        self._image, self._root = directory / "image", directory / "root"
        self._sector_bytes = sector_bytes
        self._device = ""

    def __enter__(self) -> Path:
        self._root.mkdir()
        with self._image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 32 << 20)
        try:
            self._device = _output(
                "losetup", "--find", "--show", "--sector-size", str(self._sector_bytes), self._image
            )
            _output("mkfs.ext4", "-q", "-b", "4096", self._device)
            _output("mount", self._device, self._root)
        except (OSError, subprocess.CalledProcessError) as error:
            self._detach()
            pytest.skip(f"loop devices are not allowed here: {error}")
        return self._root

    def __exit__(self, *_: object) -> None:
        _output("umount", self._root)
        self._detach()

    def _detach(self) -> None:
        if self._device:
            _output("losetup", "--detach", self._device)


def _output(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return done.stdout.strip()
