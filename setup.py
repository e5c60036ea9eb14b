"""Names the cffi build scripts; all metadata is in pyproject.toml."""

import os

from setuptools import setup

# The extension is optional: without a compiler the install succeeds and the
# pure fallbacks are used. `OFFLOAD_PURE=1` leaves it out on purpose.
PURE = os.environ.get("OFFLOAD_PURE") == "1"

setup(
    cffi_modules=[] if PURE else ["csrc/build_aio.py:ffibuilder", "csrc/build_optim.py:ffibuilder"],
)
