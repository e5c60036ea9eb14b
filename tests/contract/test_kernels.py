"""Every variant of the optimizer kernels passes the conformance class."""

import platform

from offload.testing.kernel_conformance import KernelConformance


class TestScalar(KernelConformance):
    name = "scalar"


class TestAvx2(KernelConformance):
    name = "avx2"


class TestAvx512(KernelConformance):
    name = "avx512"


if platform.machine() in ("aarch64", "arm64"):

    class TestNeon(KernelConformance):
        name = "neon"


class TestTorch(KernelConformance):
    name = "torch"
