"""Pages of which the kernel tells whether they were written to."""

import gc
import os
from pathlib import Path

import numpy as np
import torch

from offload.memory import try_watch, watched_page


def test_a_page_that_is_only_read_was_not_written():
    page = try_watch(b"\1\2")

    found = page.memory[:2].tobytes(), int(page.memory[2:].sum())

    assert found == (b"\1\2", 0)
    assert not page.was_written


def test_a_write_shows_that_changes_nothing():
    page = try_watch(b"\1\2")

    page.memory[1] = 2

    assert page.was_written


def test_each_page_is_asked_for_itself():
    pages = [try_watch(b"\1") for _ in range(3)]

    pages[1].memory[0] = 1

    assert [page.was_written for page in pages] == [False, True, False]


def test_a_page_is_there_as_long_as_a_tensor_over_it():
    memory = try_watch(b"\7").memory
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=1)
    del memory
    gc.collect()

    tensor.add_(1)

    assert tensor.item() == 8


def test_a_page_goes_with_the_last_reference_to_it():
    page = try_watch(b"\7")
    name, address = "offload-watched", f"{page.memory.ctypes.data:x}-"

    assert address in mappings_of(name)
    del page
    gc.collect()

    assert address not in mappings_of(name)


def test_pages_keep_no_descriptor():
    before = num_descriptors()

    pages = [try_watch(b"\1") for _ in range(8)]

    assert all(isinstance(page.memory, np.ndarray) for page in pages)
    assert num_descriptors() == before


def test_none_is_given_where_the_kernel_does_not_tell(monkeypatch):
    monkeypatch.setattr(os, "pread", refuse)

    assert try_watch(b"\1") is None


def test_none_is_given_where_the_page_map_ends_before_the_page(monkeypatch):
    monkeypatch.setattr(os, "pread", lambda *_: b"")

    assert try_watch(b"\1") is None


def test_pages_that_the_kernel_gave_the_process_are_not_taken_for_written(monkeypatch):
    page, untouched = try_watch(b"\1"), try_watch(b"")
    monkeypatch.setattr(watched_page, "_untouched", lambda: untouched)

    for each in page, untouched:  # as `mlockall` does
        each.memory[0] = each.memory[0]

    assert not page.was_written


def refuse(*_):
    raise PermissionError("no page map here")


def mappings_of(name):
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return "\n".join(line for line in lines if name in line)


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))
