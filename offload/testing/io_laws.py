"""What all laws of the I/O engine stand on: an engine and files."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.sizes import KIB
from offload.storage.engine import Engine
from offload.storage.file import StorageFile, open_file
from offload.testing.io_cases import (
    ATTEMPTS,
    SLOW_BYTES,
    open_direct,
)


class IOLaws:
    """Says how an engine is made, and gives the laws their files."""

    def make_engine(self, **options: int) -> Engine:
        """Returns a new engine, not opened; `options` are those of `Engine`."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with self.make_engine() as engine:
            yield engine

    @pytest.fixture
    def file(self, tmp_path: Path) -> Iterator[StorageFile]:
        file = open_file(tmp_path / "buffered.bin", create=True, direct=False)
        yield file
        file.close()

    @pytest.fixture
    def direct_file(self, tmp_path: Path) -> Iterator[StorageFile]:
        file = open_direct(tmp_path / "direct.bin")
        yield file
        file.close()

    @pytest.fixture(params=["buffered", "direct"])
    def any_file(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageFile]:
        path = tmp_path / "any.bin"
        is_direct = request.param == "direct"
        file = open_direct(path) if is_direct else open_file(path, create=True, direct=False)
        yield file
        file.close()

    def _assert_happens(
        self, try_once: Callable[[Engine], bool], file: StorageFile, *, queue_depth: int = 1
    ) -> None:
        """Checks a law that can be seen only while a transfer is in flight.

        A broken engine never shows it; a right one does, unless the transfers are too quick.
        """
        os.ftruncate(file.fd, SLOW_BYTES)
        with self.make_engine(queue_depth=queue_depth, block_bytes=64 * KIB) as engine:
            assert any(try_once(engine) for _ in range(ATTEMPTS))
