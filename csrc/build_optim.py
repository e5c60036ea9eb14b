"""Builds `offload._native._optim`; `setup.py` names it, and it runs alone to build in place."""

import re
from pathlib import Path

from cffi import FFI

DIRECTORY = Path(__file__).resolve().parent
SOURCES = (
    "optim.c",
    "gradients.c",
    "memory.c",
    "kernels_scalar.c",
    "kernels_avx2.c",
    "kernels_avx512.c",
    "kernels_neon.c",
    "cpu_features.c",
    "threads.c",
)
HEADERS = ("optim.h", "internal.h", "update_template.h", "gradient_template.h")
DECLARATIONS = re.compile(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", re.DOTALL)


def declarations() -> str:
    """Returns the part of `optim.h` that cffi can parse: all of the interface."""
    match = DECLARATIONS.search((DIRECTORY / "optim" / "optim.h").read_text())
    assert match is not None
    return match[1]


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "offload._native._optim",
    '#include "optim.h"',
    # Relative to the repository's root, where setuptools runs.
    sources=[f"csrc/optim/{name}" for name in SOURCES],
    depends=[f"csrc/optim/{name}" for name in HEADERS],
    include_dirs=["csrc/optim"],
    extra_compile_args=[
        "-std=c11",
        "-O3",
        # Bits are defined without fused multiply-add: docs/numerics.md.
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fvisibility=hidden",
        "-pthread",
    ],
    extra_link_args=["-pthread", "-lm"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,
)


if __name__ == "__main__":
    import os

    from setuptools import setup

    os.chdir(DIRECTORY.parent)
    setup(
        cffi_modules=["csrc/build_optim.py:ffibuilder"],
        script_args=["build_ext", "--inplace"],
    )
