"""Records of stores in tests: aligned memory, written and read back."""

import mmap

ALIGNMENT = 4096


def memory_of(num_bytes, fill=0):
    """Returns page-aligned memory, whose first bytes depend on `fill`."""
    memory = memoryview(mmap.mmap(-1, max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)))
    memory[:num_bytes] = content(num_bytes, fill)
    return memory


def content(num_bytes, fill=0):
    """Returns what `memory_of` begins with."""
    return bytes((fill + i) % 251 for i in range(num_bytes))


def put(store, record, num_bytes, fill=0):
    """Writes a record of that many bytes."""
    store.write(record, memory_of(num_bytes, fill), num_bytes=num_bytes).wait()


def get(store, record, **options):
    """Returns the bytes of a record."""
    num_bytes = store.num_bytes(record)
    memory = memory_of(num_bytes)
    store.read(record, memory, **options).wait()
    return bytes(memory[:num_bytes])
