"""How a store is closed, and what of one that was never used stays: nothing."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from offload.storage.ownerships import Ownerships
from offload.storage.store_directories import delete_unused
from offload.storage.store_parts import StoreParts
from offload.storage.store_paths import close_paths


def close_parts(
    parts: StoreParts | None, ownerships: Ownerships, *, made: Sequence[Path] | None
) -> None:
    """Waits for transfers in flight, closes the files and gives the directories up.

    Args:
        parts: None where there are none yet.
        ownerships: Of the store's directories.
        made: Those of a new store that were not there before; None for one that was opened.
    """
    is_deleted = False
    try:
        if parts is not None:
            with contextlib.ExitStack() as stack:  # an interrupt of the wait too closes all files
                stack.callback(close_paths, parts.paths)
                parts.transfers.wait_all()
            if made is not None and not parts.versions.records():
                is_deleted = delete_unused([path.root for path in parts.paths])
    finally:
        ownerships.release(deletes=is_deleted)
    if is_deleted and made is not None:
        for root in made:
            with contextlib.suppress(OSError):  # another has begun there
                root.rmdir()
