"""Builds `offload._native._aio`; `setup.py` names it, and it runs alone to build in place."""

import re
from pathlib import Path

from cffi import FFI

DIRECTORY = Path(__file__).resolve().parent
SOURCES = ("aio.c", "backend_libaio.c", "backend_threads.c")
HEADERS = ("aio.h", "queue.h")
DECLARATIONS = re.compile(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", re.DOTALL)


def declarations() -> str:
    """Returns the part of `aio.h` that cffi can parse: all of the interface."""
    match = DECLARATIONS.search((DIRECTORY / "aio" / "aio.h").read_text())
    assert match is not None
    return match[1]


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "offload._native._aio",
    '#include "aio.h"',
    # Relative to the repository's root, where setuptools runs.
    sources=[f"csrc/aio/{name}" for name in SOURCES],
    depends=[f"csrc/aio/{name}" for name in HEADERS],
    include_dirs=["csrc/aio"],
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,
)


if __name__ == "__main__":
    import os

    from setuptools import setup

    os.chdir(DIRECTORY.parent)
    setup(
        cffi_modules=["csrc/build_aio.py:ffibuilder"],
        script_args=["build_ext", "--inplace"],
    )
