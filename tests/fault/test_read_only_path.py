"""A path that is mounted read-only by the time of a resume is left out, and the run goes on."""

import os
import subprocess

import pytest
from parity.models import SmallGPT, build, loss_of
from parity.sessions import use_small_records
from parity.side_by_side import OPTIONS

import offload
from offload.runs.inspection import inspect_store
from offload.sizes import MIB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system"),
]


@pytest.fixture
def mounted(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(disk)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def train(stores, steps, *, resume=False):
    with offload.Session(host_memory=MIB, store=stores, resume=resume) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for step in steps:
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.save(f"at-{steps[-1]}")
        return session.state_digest(), session.stats().paths


def test_a_path_that_is_read_only_at_a_resume_is_read_and_takes_nothing_new(
    tmp_path, mounted, monkeypatch, caplog
):
    use_small_records(monkeypatch)
    plain, _ = train([tmp_path / "plain"], range(4))
    stores = [tmp_path / "a", mounted / "b"]
    _, paths = train(stores, range(2))
    assert paths[1].live_bytes > 0
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    before = {path.name: path.stat().st_mtime_ns for path in stores[1].iterdir()}

    digest, paths = train(stores, range(2, 4), resume=True)

    assert digest == plain
    assert paths[1].use == "left out"
    assert paths[1].write_bytes == 0
    assert paths[1].read_bytes > 0
    assert str(stores[1]) in caplog.text
    assert {path.name: path.stat().st_mtime_ns for path in stores[1].iterdir()} == before
    assert inspect_store(stores[0]).digest == plain
