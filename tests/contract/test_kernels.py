"""Every variant of the optimizer kernels passes the conformance class."""

from offload.testing.kernel_conformance import KernelConformance


class TestScalar(KernelConformance):
    name = "scalar"


class TestAvx2(KernelConformance):
    name = "avx2"


class TestAvx512(KernelConformance):
    name = "avx512"


class TestNeon(KernelConformance):
    name = "neon"


class TestTorch(KernelConformance):
    name = "torch"
