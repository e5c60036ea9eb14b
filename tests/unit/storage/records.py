"""Records of small stores: written, and read again."""

import mmap

BLOCK = 4096


def memory_of(content, padded=None):
    """Page-aligned memory that begins with `content`; the rest is 0xAA."""
    length = padded or max(BLOCK, -(-len(content) // BLOCK) * BLOCK)
    memory = memoryview(mmap.mmap(-1, length))
    memory[:] = content + b"\xaa" * (length - len(content))
    return memory


def put(store, record, content):
    store.write(record, memory_of(content), num_bytes=len(content)).wait()


def get(store, record):
    num_bytes = store.num_bytes(record)
    memory = memory_of(b"", padded=max(BLOCK, -(-num_bytes // BLOCK) * BLOCK))
    store.read(record, memory).wait()
    return bytes(memory[:num_bytes])
