"""Starting a run's store from a copied checkpoint."""

from offload.config import Config
from offload.runs.run_directory import RunDirectory
from offload.storage.drain import copy_store
from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath


def copy_in(config: Config, directory: RunDirectory) -> None:
    """Makes the store of a new run directory from the copy that it names; the copy stays as it is.

    Raises:
        StorageError: The paths have no room.
        CorruptStateError: The copy is damaged.
    """
    assert directory.copied_from is not None, "the caller has found the copy"
    tier = config.tiers.storage
    paths = [
        StorePath(root=root, capacity_bytes=tier.capacity_of(index))
        for index, root in enumerate(directory.stores)
    ]
    with Engine() as engine:
        source = BlockStore(directory.copied_from, engine=engine)
        source.open(read_only=True)
        target = BlockStore(paths, engine=engine, block_bytes=source.block_bytes)
        try:
            target.create()
            copy_store(source, target)
        finally:
            target.close()
            source.close()
