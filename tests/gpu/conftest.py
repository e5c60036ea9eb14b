"""What holds for every test on a GPU: it is warm, and its kernels give the same bits each time."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read as CUDA starts


@pytest.fixture(scope="session", autouse=True)
def warm_device():
    """Takes what CUDA takes once, so that no test is said to have left descriptors or threads."""
    if not torch.cuda.is_available():
        return
    weight = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (weight @ weight).sum().backward()
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def deterministic_kernels():
    """Attention's backward adds in any order else: its bits differ from run to run."""
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fills
