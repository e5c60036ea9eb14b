import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from offload.errors import ConfigError
from offload.runs.data import Text, open_text, standard_library_files


def _text(num_train, num_validation):
    rng = np.random.default_rng(0)
    return Text(
        train=rng.integers(0, 256, num_train, dtype=np.uint8),
        validation=rng.integers(0, 256, num_validation, dtype=np.uint8),
    )


def _write(folder, **files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_standard_library_leaves_out_tests_and_packages_and_sorts_by_posix_path(tmp_path):
    for name in (
        "b.py",
        "a/z.py",
        "a-b.py",
        "test.py",
        "note.txt",
        "test/x.py",
        "lib/tests/x.py",
        "site-packages/p/x.py",
        "dist-packages/x.py",
        "a/__pycache__/x.py",
        "idlelib/x.py",
    ):
        _write(tmp_path, **{name: b"x"})

    found = standard_library_files(tmp_path)

    # "-" sorts before "/", so that comparing parts instead of the whole path would differ.
    assert [p.relative_to(tmp_path).as_posix() for p in found] == [
        "a-b.py",
        "a/z.py",
        "b.py",
        "test.py",
    ]


def test_standard_library_text_begins_with_its_first_file():
    text = open_text("python-stdlib", files=(), validation_fraction=0.05)

    root = Path(sysconfig.get_path("stdlib"))
    first = standard_library_files(root)[0].read_bytes()
    assert text.train[: len(first)].tobytes() == first
    assert text.train[len(first)] == 0
    total = len(text.train) + len(text.validation)
    assert len(text.train) == total * 95 // 100
    text.check(context=256)


def test_files_are_joined_by_one_zero_byte_in_the_order_given(tmp_path):
    _write(tmp_path, b=b"second", a=b"first", **{"g1.txt": b"1", "g2.txt": b"2"})

    text = open_text(
        "files",
        files=(str(tmp_path / "b"), str(tmp_path / "a"), str(tmp_path / "g*.txt")),
        validation_fraction=0.25,
    )

    joined = b"second\0first\x001\x002"
    assert text.train.tobytes() + text.validation.tobytes() == joined
    assert len(text.train) == len(joined) * 3 // 4


@pytest.mark.parametrize("name", ["absent", "none-*.txt"])
def test_missing_file_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match=name.replace("*", r"\*")):
        open_text("files", files=(str(tmp_path / name),), validation_fraction=0.05)


def test_batch_is_cut_at_seeded_starts_and_targets_follow_by_one():
    text = _text(1000, 100)

    batch = text.train_batch(seed=3, step=5, micro_step=1, batch=4, context=10)

    starts = np.random.default_rng([3, 5, 1]).integers(0, 1000 - 10, size=4)
    for row, start in enumerate(starts):
        assert batch.inputs[row].tolist() == text.train[start : start + 10].tolist()
        assert batch.targets[row].tolist() == text.train[start + 1 : start + 11].tolist()


# 3 does not divide 16: the last batch is short.
@pytest.mark.parametrize("batch", [1, 3, 16, 20])
def test_validation_is_sixteen_evenly_spread_windows(batch):
    text = _text(100, 1000)

    batches = list(text.validation_batches(batch=batch, context=10))

    rows = [row.tolist() for b in batches for row in b.inputs]
    targets = [row.tolist() for b in batches for row in b.targets]
    stride = (1000 - 10 - 1) // 15
    assert rows == [text.validation[j * stride : j * stride + 10].tolist() for j in range(16)]
    assert targets == [
        text.validation[j * stride + 1 : j * stride + 11].tolist() for j in range(16)
    ]


# One window needs context + 1 bytes; one byte less is refused.
@pytest.mark.parametrize(
    "num_train, num_validation, ok", [(11, 11, True), (10, 11, False), (11, 10, False)]
)
def test_text_shorter_than_a_window_is_refused(num_train, num_validation, ok):
    text = _text(num_train, num_validation)

    if ok:
        text.check(context=10)
        assert len(text.train_batch(seed=0, step=0, micro_step=0, batch=2, context=10).inputs) == 2
        assert len(list(text.validation_batches(batch=16, context=10))) == 1
    else:
        with pytest.raises(ConfigError, match="at least 11 bytes"):
            text.check(context=10)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_what_may_have_no_end_is_no_text(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")

    with pytest.raises(ConfigError, match=rf"`{name}`: expected a file of text, found a device"):
        open_text("files", files=[name], validation_fraction=0.5)
