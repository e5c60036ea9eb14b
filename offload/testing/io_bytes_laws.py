"""Laws of the I/O engine: what is written comes back."""

import os

import numpy as np
import pytest
import torch

from offload.sizes import KIB, MIB
from offload.storage.engine import Engine
from offload.storage.file import StorageFile
from offload.testing.io_cases import (
    aligned,
    random_bytes,
    wait_all,
)
from offload.testing.io_laws import IOLaws


class BytesLaws(IOLaws):
    """What is written comes back."""

    # 0 and 1; around the alignment and around the piece, where cutting goes wrong.
    @pytest.mark.parametrize("num_bytes", [0, 1, 511, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1])
    @pytest.mark.parametrize("offset", [0, 1, 4095, (1 << 32) + 3])
    def test_bytes_of_any_length_at_any_offset_come_back(
        self, engine: Engine, file: StorageFile, num_bytes: int, offset: int
    ) -> None:
        written = random_bytes(num_bytes)
        found = bytearray(num_bytes)

        engine.write(file, offset, written).wait()
        engine.read(file, offset, found).wait()

        assert found == written
        assert os.pread(file.fd, num_bytes, offset) == written

    @pytest.mark.parametrize("num_blocks", [1, 3, 257])
    def test_aligned_bytes_of_a_direct_file_come_back(
        self, engine: Engine, direct_file: StorageFile, num_blocks: int
    ) -> None:
        num_bytes = num_blocks * direct_file.alignment
        written, found = aligned(num_bytes), aligned(num_bytes)
        written[:] = np.frombuffer(random_bytes(num_bytes), np.uint8)

        engine.write(direct_file, direct_file.alignment, written).wait()
        engine.read(direct_file, direct_file.alignment, found).wait()

        assert np.array_equal(found, written)
        assert (direct_file.path.read_bytes()[direct_file.alignment :]) == written.tobytes()

    @pytest.mark.parametrize("queue_depth", [1, 8])
    def test_large_transfers_are_cut_and_joined(self, file: StorageFile, queue_depth: int) -> None:
        num_bytes = 9 * MIB + 12345
        written = random_bytes(num_bytes)
        found = bytearray(num_bytes)

        with self.make_engine(queue_depth=queue_depth, block_bytes=64 * KIB) as engine:
            engine.write(file, 777, written).wait()
            engine.read(file, 777, found).wait()

        assert found == written

    def test_many_tickets_in_flight_fill_the_right_memory(
        self, engine: Engine, any_file: StorageFile
    ) -> None:
        num_bytes = 64 * KIB
        written, found = aligned(100 * num_bytes), aligned(100 * num_bytes)
        written[:] = np.frombuffer(random_bytes(100 * num_bytes), np.uint8)
        parts = [slice(i * num_bytes, (i + 1) * num_bytes) for i in range(100)]

        wait_all([engine.write(any_file, part.start, written[part]) for part in parts])
        wait_all([engine.read(any_file, part.start, found[part]) for part in reversed(parts)])

        assert np.array_equal(found, written)

    def test_tensors_are_moved_in_place(self, engine: Engine, file: StorageFile) -> None:
        written = torch.randn(3, 1001).to(torch.bfloat16)
        found = torch.zeros_like(written)

        engine.write(file, 2, written).wait()
        engine.read(file, 2, found).wait()
        engine.write(file, 0, torch.empty(0)).wait()
        engine.read(file, 0, np.empty((0, 4))).wait()

        assert torch.equal(found, written)

    @pytest.mark.slow
    @pytest.mark.stress
    def test_more_than_2_gib_in_one_transfer(self, engine: Engine, file: StorageFile) -> None:
        num_bytes = (1 << 31) + 4099  # Linux moves at most 2 GiB - 4 KiB per call
        marks = {0: 1, (1 << 31) - 4096: 2, (1 << 31) - 1: 3, 1 << 31: 4, num_bytes - 1: 5}
        os.ftruncate(file.fd, num_bytes)  # the rest is a hole
        for position, value in marks.items():
            os.pwrite(file.fd, bytes([value]), position)
        memory = np.full(num_bytes, 255, np.uint8)

        engine.read(file, 0, memory).wait()
        marked = {int(i): int(memory[i]) for i in np.flatnonzero(memory)}
        engine.write(file, num_bytes, memory).wait()

        assert marked == marks
        assert os.fstat(file.fd).st_size == 2 * num_bytes
        for position, value in marks.items():
            assert os.pread(file.fd, 1, num_bytes + position) == bytes([value])
