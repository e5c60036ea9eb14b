"""Laws of the I/O engine: what goes wrong is said, and the engine stays usable."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from offload.errors import ConfigError, StorageError
from offload.sizes import MIB
from offload.storage.engine import Engine
from offload.storage.file import StorageFile, open_file
from offload.testing.io_cases import (
    aligned,
)
from offload.testing.io_laws import IOLaws


class ErrorLaws(IOLaws):
    """What goes wrong is said, and the engine stays usable."""

    def test_a_read_beyond_the_end_says_what_was_found(
        self, engine: Engine, file: StorageFile
    ) -> None:
        engine.write(file, 0, bytes(3 * MIB)).wait()

        ticket = engine.read(file, 100, bytearray(5 * MIB))

        with pytest.raises(StorageError) as failure:
            ticket.wait()
        assert failure.value.errno == errno.ENODATA
        for part in (str(file.path), "offset 100", f"length {5 * MIB}", f"found {3 * MIB - 100}"):
            assert part in str(failure.value)

    def test_a_read_beyond_the_end_of_a_direct_file_says_what_was_found(
        self, engine: Engine, direct_file: StorageFile
    ) -> None:
        num_bytes = 4 * direct_file.alignment
        engine.write(direct_file, 0, aligned(num_bytes)).wait()
        # Between two multiples of the alignment: the kernel's last count is none.
        os.truncate(direct_file.path, num_bytes - 100)

        ticket = engine.read(direct_file, 0, aligned(num_bytes))

        with pytest.raises(StorageError, match=f"found {num_bytes - 100} ") as failure:
            ticket.wait()
        assert failure.value.errno == errno.ENODATA

    def test_each_wait_gives_the_same_error(self, engine: Engine, file: StorageFile) -> None:
        ticket = engine.read(file, 0, bytearray(1))

        messages = set()
        for _ in range(3):
            with pytest.raises(StorageError) as failure:
                ticket.wait()
            messages.add(str(failure.value))

        assert ticket.done()
        assert len(messages) == 1

    def test_a_full_device_is_an_error(self, engine: Engine) -> None:
        full = StorageFile(path=Path("/dev/full"), fd=os.open("/dev/full", os.O_RDWR))
        try:
            ticket = engine.write(full, 0, bytes(3 * MIB))

            with pytest.raises(StorageError, match="/dev/full") as failure:
                ticket.wait()
            assert failure.value.errno == errno.ENOSPC
        finally:
            full.close()

    def test_a_full_file_system_is_an_error(self, engine: Engine, tmp_path: Path) -> None:
        with _mounted_tmpfs(tmp_path / "tiny", num_bytes=MIB) as directory:
            file = open_file(directory / "file.bin", create=True)
            source = aligned(8 * MIB)

            ticket = engine.write(file, 0, source)

            with pytest.raises(StorageError, match=str(file.path)) as failure:
                ticket.wait()
            file.close()
        assert failure.value.errno == errno.ENOSPC

    @pytest.mark.parametrize("num_bytes", [1, 3 * MIB])
    def test_a_closed_file_is_an_error(
        self, engine: Engine, file: StorageFile, num_bytes: int
    ) -> None:
        file.close()

        for ticket in (
            engine.read(file, 0, bytearray(num_bytes)),
            engine.write(file, 0, bytes(num_bytes)),
        ):
            with pytest.raises(StorageError, match=str(file.path)) as failure:
                ticket.wait()
            assert failure.value.errno == errno.EBADF
        with pytest.raises(StorageError, match=str(file.path)):
            engine.flush(file)

    def test_an_error_leaves_the_engine_usable(self, engine: Engine, file: StorageFile) -> None:
        with pytest.raises(StorageError):
            engine.read(file, 0, bytearray(20 * MIB)).wait()

        engine.write(file, 0, b"still here").wait()

        assert os.pread(file.fd, 10, 0) == b"still here"

    @pytest.mark.parametrize("wrong", ["offset", "length", "address"])
    def test_a_misaligned_direct_transfer_is_refused(
        self, engine: Engine, direct_file: StorageFile, wrong: str
    ) -> None:
        alignment = direct_file.alignment
        memory = aligned(3 * alignment)
        start = 1 if wrong == "address" else 0
        stop = start + alignment - (1 if wrong == "length" else 0)
        offset = 1 if wrong == "offset" else 0

        with pytest.raises(ValueError, match=f"{alignment} bytes, found {wrong}") as failure:
            engine.read(direct_file, offset, memory[start:stop])

        assert isinstance(failure.value, ConfigError)
        assert str(direct_file.path) in str(failure.value)

    def test_unfit_memory_and_offsets_are_refused(self, engine: Engine, file: StorageFile) -> None:
        with pytest.raises(ConfigError, match="read-only"):
            engine.read(file, 0, b"constant")
        with pytest.raises(ConfigError, match="contiguous"):
            engine.write(file, 0, np.zeros((4, 4))[:, ::2])
        with pytest.raises(ConfigError, match="contiguous"):
            engine.write(file, 0, torch.zeros(4, 4).t()[1:])
        with pytest.raises(ConfigError, match="offset -1"):
            engine.read(file, -1, bytearray(1))
        with pytest.raises(ConfigError, match="range"):
            engine.read(file, (1 << 63) - 1, bytearray(1))
        with pytest.raises(TypeError):
            engine.write(file, 0, 17)  # type: ignore[arg-type]


@contextmanager
def _mounted_tmpfs(directory: Path, *, num_bytes: int) -> Iterator[Path]:
    """Mounts a file system of that size; skips the test where mounting is not allowed."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    if os.geteuid() != 0 or not _succeeds(command):
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield directory
    finally:
        assert _succeeds(["umount", str(directory)])


def _succeeds(command: list[str]) -> bool:
    try:
        # The commands are constants of this file.
        return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603
    except FileNotFoundError:
        return False
