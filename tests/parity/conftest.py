import argparse
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from parity.selection import covering_pairs

from offload.config import load_config
from offload.runs.train import run_training

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples"


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Keeps threads of other tests' processes from waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_config():
    """Returns the config of `examples/small.toml`, on one file of text, with changes."""

    def load(**changes):
        values = {
            "data.source": "files",
            "data.files": f'["{argparse.__file__}"]',
            "model.layers": 2,
            "model.width": 128,
            "tiers.host.memory": "16MiB",
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        overrides = [
            f"{key}={str(value).lower()}" if isinstance(value, bool) else f"{key}={value}"
            for key, value in values.items()
        ]
        return load_config(EXAMPLES / "small.toml", overrides)

    return load


@pytest.fixture
def train(monkeypatch):
    """Returns `run_training` without the probe, which takes seconds and changes no bit."""
    monkeypatch.setattr("offload.runs.train.probe_run", lambda *_: None)
    return run_training


ONE_IN = 10
"""Of the tests that open a session, one in so many runs on the emulated device by default too.

With `slow` so many more do that each pair of a test's parameters does; the rest is of `stress`.
"""


NAME_THEIR_DEVICE = ("test_devices", "test_device_placement")


def pytest_generate_tests(metafunc):
    """Runs every test that opens a session on `cpu` and on `emulated`, unless it is `unified`."""
    module = metafunc.module
    name = module.__name__.rpartition(".")[2]
    opens = hasattr(module, "open_session") and name not in NAME_THEIR_DEVICE
    if opens and metafunc.definition.get_closest_marker("unified") is None:
        metafunc.parametrize("device", ["cpu", "emulated"], indirect=True)


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """The device of the test's sessions."""
    kind = getattr(request, "param", "cpu")
    monkeypatch.setattr("parity.sessions.DEVICE", kind)
    return kind


def pytest_collection_modifyitems(items):
    of_function = defaultdict(list)
    for item in items:  # those of other folders too
        if FOLDER in item.path.parents and _device_of(item) == "emulated":
            of_function[item.nodeid.partition("[")[0]].append(item)
    for cases in of_function.values():
        _choose(cases)


def _choose(cases):
    """Leaves to `stress` what has no pair of values that others of a test do not have."""
    quick = {at for at, item in enumerate(cases) if zlib.crc32(item.name.encode()) % ONE_IN == 0}
    chosen = covering_pairs([_values_of(item) for item in cases], given=quick)
    for at, item in enumerate(cases):
        if at not in quick:
            item.add_marker(pytest.mark.slow)
        if at not in chosen:
            item.add_marker(pytest.mark.stress)


def _values_of(item):
    return {name: repr(value) for name, value in item.callspec.params.items()}


def _device_of(item):
    return getattr(getattr(item, "callspec", None), "params", {}).get("device")
