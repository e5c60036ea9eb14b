"""Which kernels are loaded, and what disabling features does."""

import json
import logging
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from offload._native import optim as native
from offload._native.cpus import usable_cpus
from offload.errors import ConfigError
from offload.optim import kernels as kernels_module
from offload.optim.kernels import (
    Operands,
    Range,
    adamw_scalars,
    kernel_names,
    load_kernels,
)

ROOT = Path(__file__).parents[3]
needs_extension = pytest.mark.skipif(
    not native.available(), reason=f"{native.unavailable_because()}"
)


@needs_extension
@pytest.mark.parametrize(
    ("disabled", "left"),
    [
        ("", ("avx512", "avx2", "scalar", "torch")),
        ("avx512", ("avx2", "scalar", "torch")),
        ("avx2", ("scalar", "torch")),
        (" avx512, avx2 ,", ("scalar", "torch")),
    ],
)
def test_disabling_features_leaves_the_other_kernels(
    monkeypatch: pytest.MonkeyPatch, disabled: str, left: tuple[str, ...]
) -> None:
    monkeypatch.delenv(native.DISABLE_VARIABLE, raising=False)
    here = kernel_names()
    monkeypatch.setenv(native.DISABLE_VARIABLE, disabled)

    names = kernel_names()

    assert names == tuple(name for name in left if name in here)
    assert load_kernels().name == names[0]


@needs_extension
def test_disabled_kernels_cannot_be_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.DISABLE_VARIABLE, "avx512,avx2")

    for name in ("avx512", "avx2"):
        with pytest.raises(ConfigError, match=f"`{name}`.*`scalar`"):
            load_kernels(name)


@needs_extension
@pytest.mark.parametrize("names", ["sse", "avx512f", "avx2;avx512", "AVX2"])
def test_an_unknown_feature_is_refused(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv(native.DISABLE_VARIABLE, names)

    with pytest.raises(ConfigError, match=native.DISABLE_VARIABLE):
        load_kernels()


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`sve`.*`torch`"):
        load_kernels("sve")
    with pytest.raises(ConfigError, match="num_threads"):
        load_kernels(num_threads=0)


def test_pure_mode_uses_torch_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OFFLOAD_PURE", "1")
    kernels_module._warn_once.cache_clear()

    with caplog.at_level(logging.WARNING, logger="offload.optim"):
        names = [load_kernels().name, load_kernels().name]

    assert names == ["torch", "torch"]
    assert [record.message.count("OFFLOAD_PURE=1") for record in caplog.records] == [1]
    with pytest.raises(ConfigError, match="OFFLOAD_PURE"):
        load_kernels("scalar")


@needs_extension
def test_a_missing_extension_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("no module")

    monkeypatch.setattr(native, "_extension", missing)

    assert not native.available()
    assert load_kernels().name == "torch"
    assert native.copy_rate_bytes_per_s(num_bytes=1 << 20) > 0


@needs_extension
def test_kernels_ignore_a_caller_that_flushes_subnormals() -> None:
    tiny = torch.full((100,), 1e-40)
    scalars = adamw_scalars(lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=1)
    operands = Operands(
        parameter=tiny.clone(),
        gradient=tiny.clone(),
        state={"exp_avg": tiny.clone(), "exp_avg_sq": tiny.clone()},
    )
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        for name in native.variants():
            whole = Range(start=0, stop=100, scalars=scalars)
            load_kernels(name).update(operands, [whole])
        flushed = torch.full((1,), 1e-40).mul(1.0).view(torch.int32).item() == 0
    finally:
        torch.set_flush_denormal(False)

    assert flushed
    assert torch.equal(operands.parameter, tiny)
    assert operands.state["exp_avg_sq"].view(torch.int32).ne(0).all()


@needs_extension
def test_the_copy_rate_is_measured() -> None:
    assert native.copy_rate_bytes_per_s(num_bytes=1 << 20, num_threads=2) > 1e6


@needs_extension
def test_one_thread_for_torch_is_not_one_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun does
    assert torch.get_num_threads() == 1

    kernels = load_kernels()

    assert kernels.num_threads == usable_cpus()


@needs_extension
def test_other_threads_run_while_kernels_do() -> None:
    # A thread that comes late to its turn, on a busy machine, says nothing: several tries.
    assert any(_runs_beside_a_kernel() for _ in range(5))


def _runs_beside_a_kernel() -> bool:
    gradient = torch.zeros(1 << 22)
    array = native.GradientArray(
        address=gradient.data_ptr(), num_elements=gradient.numel(), dtype="float32"
    )
    has_begun, is_over = threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        native.sums_of_squares("scalar", [array] * 16, scales=(1.0, 1.0), num_threads=1)
        is_over.set()

    thread = threading.Thread(target=work)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # only who gives the lock up lets others run
    try:
        thread.start()
        has_begun.wait()
        return not is_over.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()


@needs_extension
def test_kernels_run_after_a_fork() -> None:
    # Its own process: a fork of this one would inherit the threads of everything here.
    program = """
import json, os, torch
from offload.optim.kernels import load_kernels
kernels = load_kernels(num_threads=2)
gradient = torch.ones(300_000)
before = kernels.sums_of_squares([gradient])
child = os.fork()
if child == 0:
    os._exit(0 if kernels.sums_of_squares([gradient]) == before else 1)
print(json.dumps([before, os.waitpid(child, 0)[1]]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )

    assert json.loads(result.stdout) == [[300_000.0], 0]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs `nm`")
@pytest.mark.parametrize("library", ["optim", "aio"])
def test_libraries_export_only_their_own_names(library: str) -> None:
    built = list((ROOT / "offload" / "_native").glob(f"_{library}.*.so"))
    if not built:
        pytest.skip("the extension is not built")
    own = (f"ofl_{library}_", f"PyInit__{library}", "_init", "_fini")

    found = subprocess.run(
        ["nm", "-D", "--defined-only", str(built[0])],
        capture_output=True,
        text=True,
        check=True,
    )

    names = [line.split()[-1] for line in found.stdout.splitlines()]
    assert [name for name in names if not name.startswith(own)] == []


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("nm") is None, reason="needs a C compiler"
)
def test_objects_define_only_names_of_the_library_and_compile_alone(tmp_path: Path) -> None:
    sources = sorted(str(path) for path in (ROOT / "csrc" / "optim").glob("*.c"))
    subprocess.run(["cc", "-c", *sources], cwd=tmp_path, check=True)

    found = subprocess.run(
        ["nm", "-g", "--defined-only", *sorted(str(path) for path in tmp_path.iterdir())],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    names = [line.split()[-1] for line in found.stdout.splitlines() if " " in line]
    assert names
    assert [name for name in names if not name.startswith("ofl_optim_")] == []
