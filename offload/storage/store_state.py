"""The states of a store between making it and closing it."""

import enum


class StoreState(enum.Enum):
    """What may be asked of a store."""

    CLOSED = "closed"
    """No file is open; `create` or `open` comes next."""
    WRITABLE = "open for writing"
    """This process owns the directory."""
    READ_ONLY = "open for reading"
    """Nothing is owned; another process may own the directory and rewrite blocks."""
