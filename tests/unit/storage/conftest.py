"""A store of small blocks, and the engine that it stands on."""

import pytest
from unit.storage.records import BLOCK

from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


@pytest.fixture
def store(tmp_path, engine):
    store = BlockStore(
        tmp_path / "deep" / "store",
        engine=engine,
        block_bytes=BLOCK,
        describe=lambda record: f"weight of {record}",
    )
    store.create()
    yield store
    store.close()


@pytest.fixture
def store_on_two_paths(tmp_path, engine):
    store = BlockStore(
        [StorePath(root=tmp_path / name) for name in "ab"], engine=engine, block_bytes=BLOCK
    )
    store.create()
    yield store
    store.close()
