"""Builds `offload._native._aio`; `setup.py` names it, and it runs alone to build in place."""

import re
import tempfile
from pathlib import Path

from cffi import FFI
from setuptools._distutils.ccompiler import new_compiler
from setuptools._distutils.errors import CompileError, LinkError
from setuptools._distutils.sysconfig import customize_compiler

DIRECTORY = Path(__file__).resolve().parent
SOURCES = (
    "aio.c",
    "request.c",
    "pieces.c",
    "backend_fault.c",
    "backend_libaio.c",
    "backend_threads.c",
    "backend_uring.c",
    "uring_registered.c",
)
HEADERS = ("aio.h", "queue.h", "uring_registered.h")
PROBE = """
#include <liburing.h>
int probe(struct io_uring *ring);
int probe(struct io_uring *ring) { return io_uring_queue_init(1, ring, 0); }
"""
DECLARATIONS = re.compile(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", re.DOTALL)


def declarations() -> str:
    """Returns the part of `aio.h` that cffi can parse: all of the interface."""
    match = DECLARATIONS.search((DIRECTORY / "aio" / "aio.h").read_text())
    assert match is not None
    return match[1]


def liburing_arguments() -> list[str] | None:
    """Returns what links liburing into a library, or None where that is not possible here.

    The static library is preferred: what is built then runs where liburing is not installed.
    """
    compiler = new_compiler()
    customize_compiler(compiler)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.c")
        source.write_text(PROBE)
        library = str(Path(directory, "probe.so"))
        try:
            objects = compiler.compile(
                [str(source)], output_dir=directory, extra_postargs=["-fPIC"]
            )
        except CompileError:
            return None
        for arguments in (["-l:liburing.a", "-Wl,--exclude-libs,ALL"], ["-luring"]):
            try:
                compiler.link_shared_object(objects, library, extra_postargs=arguments)
            except LinkError:
                continue
            return arguments
    return None


LIBURING = liburing_arguments()
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
    extra_link_args=["-pthread", *(LIBURING or [])],
    define_macros=[
        ("Py_LIMITED_API", "0x030B0000"),
        *([] if LIBURING else [("OFL_AIO_NO_LIBURING", None)]),
    ],
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
