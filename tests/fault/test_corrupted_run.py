import argparse
import os
from pathlib import Path

import pytest
import torch

from offload.cli.app import run as run_cli
from offload.config import load_config
from offload.errors import ConfigError, CorruptStateError
from offload.runs.inspection import inspect_store, verify_store
from offload.runs.train import run_training
from offload.storage.opening import find_store

SMALL = Path(__file__).parents[2] / "examples" / "small.toml"


def config(steps):
    return load_config(
        SMALL,
        [
            f"train.steps={steps}",
            "model.layers=2",
            "model.width=128",
            "data.source=files",
            f'data.files=["{argparse.__file__}"]',
        ],
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two steps, without the probe, and its result."""
    monkeypatch.setattr("offload.runs.train.probe_run", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run_training(config(2), run_dir=tmp_path / "run")
    torch.set_num_threads(threads)


def damage(result, record):
    """Changes one byte in the middle of a stored record and returns where its block begins."""
    store = Path(result.store)
    manifest = find_store([store]).manifest
    version = manifest.records[record]
    block = version.num_blocks // 2
    offset = version.extents[0].first_block + block  # small records have one extent
    (data,) = [path for path in store.iterdir() if path.stat().st_size > 1 << 20]
    fd = os.open(data, os.O_RDWR)
    at = offset * manifest.block_bytes + 5
    byte = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte[0] ^ 1]), at)
    os.fsync(fd)
    os.close(fd)
    return offset * manifest.block_bytes


def test_inspect_gives_the_digest_of_the_run(run):
    by_run, by_store = inspect_store(Path(run.run_dir)), inspect_store(Path(run.store))

    assert by_run == by_store
    assert by_run.digest == run.state_digest
    assert (by_run.step, by_run.parameters) == (2, run.parameters)
    assert by_run.records == len(find_store([Path(run.store)]).manifest.records)
    assert verify_store(Path(run.run_dir)).to_json()["ok"] is True


@pytest.mark.parametrize("kind", ["parameter", "state"])
def test_verify_names_record_parameter_file_and_offset_of_a_flipped_bit(run, kind):
    names = find_store([Path(run.store)]).manifest.records
    record = next(name for name in names if name.startswith(kind))
    offset = damage(run, record)

    found = verify_store(Path(run.run_dir)).to_json()

    assert found["ok"] is False
    (bad,) = found["bad"]
    assert (bad["record"], bad["offset"]) == (record, offset)
    assert "weight" in bad["parameter"]
    assert (Path(bad["path"]) / bad["file"]).is_file()


def test_a_resume_from_damaged_parameters_names_record_and_parameter(run):
    record = "parameter/blocks.1#0"
    damage(run, record)

    with pytest.raises(CorruptStateError, match=rf"(?s){record}.*blocks\.1\.norm1\.weight"):
        run_training(config(3), run_dir=run.run_dir, resume="auto")


def test_a_path_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        inspect_store(tmp_path / "absent")


def test_verify_of_a_damaged_manifest_exits_with_1_and_names_it(run, capsys):
    manifest = next(Path(run.store).glob("manifest-*"))
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)

    code = run_cli(["verify", run.run_dir, "--json"])

    assert code == 1
    assert manifest.name in capsys.readouterr().out


def test_a_resume_from_a_truncated_data_file_names_file_record_and_parameter(run):
    (data,) = Path(run.store).glob("data-*")
    records = find_store([Path(run.store)]).manifest.records
    last, version = max(records.items(), key=lambda item: item[1].extents[-1].end_block)
    os.truncate(data, (version.extents[-1].end_block - 1) << 20)

    with pytest.raises(CorruptStateError) as caught:
        run_training(config(3), run_dir=run.run_dir, resume="auto")

    message = str(caught.value)
    assert last in message
    assert str(data) in message
    assert "weight" in message
