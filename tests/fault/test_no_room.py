"""A step for which the paths have no room is refused before it writes anything."""

import errno
import os
import re
import subprocess

import pytest
from parity.models import SmallGPT, build, loss_of
from parity.sessions import use_small_records
from parity.side_by_side import OPTIONS
from storage_memory import get, memory_of, put

import offload
from offload.errors import PlanError, StorageError
from offload.runs.inspection import inspect_store
from offload.sizes import MIB
from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath

BLOCK = 4096


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def train(model, optimizer, step):
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


HOST = {"memory": 220 << 10, "window": 1}
"""A window of one record: one is written at a time."""


def open_session(tmp_path, *, policy=None, **storage):
    config = {"tiers": {"host": HOST, "storage": storage}, "policy": policy or {}}
    return offload.Session(config, store=[tmp_path / "a", tmp_path / "b"])


def open_on(disk, **options):
    return offload.Session({"tiers": {"host": HOST}}, store=disk / "run", **options)


def version_bytes(tmp_path):
    """Bytes of one version of the model, and its digest after four steps."""
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train(model, optimizer, 0)
        session.commit()
        size = sum(path.live_bytes for path in session.stats().paths)
        for step in range(1, 4):
            train(model, optimizer, step)
        return size, session.state_digest()


def test_a_step_without_room_changes_nothing_and_may_be_done_once_there_is_room(tmp_path):
    one, digest = version_bytes(tmp_path / "free")
    with open_session(tmp_path / "full", capacity=one + 2 * MIB) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train(model, optimizer, 0)
        session.save("first")
        train(model, optimizer, 1)
        train(model, optimizer, 2)  # the version of step 2, which nothing keeps, gives way
        session.commit()
        before = session.stats()
        loss_of(model, 3).backward()

        with pytest.raises(StorageError, match="cannot make step 4") as caught:
            optimizer.step()

        assert caught.value.errno == errno.ENOSPC
        assert re.search(r"`first` [\d.]+ MiB", str(caught.value))
        after = session.stats()
        assert (after.write_bytes, after.completed_steps) == (before.write_bytes, 3)
        assert [p.live_bytes for p in after.paths] == [p.live_bytes for p in before.paths]
        session.commit()  # nothing is dirty, so there is room for that
        session.delete_checkpoint("first")
        optimizer.step()
        assert session.state_digest() == digest


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_updates_under_backward_are_refused_where_staged_versions_have_no_room(tmp_path, overlap):
    one, _ = version_bytes(tmp_path / "free")
    with open_session(
        tmp_path / "full", policy={"overlap": overlap}, capacity=one - 2 * MIB
    ) as session:  # on two paths
        model = session.wrap(build(SmallGPT))
        session.AdamW(model.parameters(), **OPTIONS)
        before = session.stats()

        with pytest.raises(StorageError, match="cannot make step 1") as caught:
            loss_of(model, 0).backward()

        assert caught.value.errno == errno.ENOSPC
        assert session.stats().write_bytes == before.write_bytes


def test_space_that_a_step_may_take_is_reserved_before_it_writes(tmp_path, monkeypatch):
    with Engine() as engine:
        roots = [tmp_path / "a", tmp_path / "b"]
        store = BlockStore([StorePath(root=r) for r in roots], engine=engine, block_bytes=BLOCK)
        store.create()
        sizes = {f"r{i}": 50 * BLOCK for i in range(8)}
        for name, size in sizes.items():
            put(store, name, size)
        store.commit({})
        groups = [{name: size} for name, size in sizes.items()]

        store.require_room(groups, num_in_flight=1, what="test")

        monkeypatch.setattr(os, "posix_fallocate", full)  # another program takes the rest
        for round_ in (1, 2):
            for name, size in sizes.items():
                put(store, name, size, fill=round_)
        store.commit({})
        assert get(store, "r3") == bytes(memory_of(50 * BLOCK, 2))
        store.save("kept")
        for name, size in sizes.items():
            put(store, name, size, fill=3)
        store.commit({})
        with pytest.raises(StorageError, match=r"cannot test: .* delete checkpoints"):
            store.require_room(groups, num_in_flight=1, what="test")
        store.close()


def full(fd, offset, length):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_kept_and_what_gives_way_are_told_apart(tmp_path):
    with Engine() as engine:
        store = BlockStore(
            tmp_path, engine=engine, block_bytes=BLOCK, capacity_bytes=25 * BLOCK
        )  # fmt: skip
        store.create()
        groups = [{"a": 4 * BLOCK, "b": 2 * BLOCK}, {"c": 3 * BLOCK}]

        def is_refused(num_in_flight):
            try:
                store.require_room(groups, num_in_flight=num_in_flight, what="test")
            except StorageError as error:
                return int(re.search(r"expected (\d+) KiB", str(error)).group(1)) // 4
            return 0

        assert is_refused(1) == 0
        for name, size in (("a", 4), ("b", 2), ("c", 3)):
            put(store, name, size * BLOCK)
        # 9 of 25 are taken and none of them is kept: 6 or 9 more while they are written.
        assert (is_refused(1), is_refused(2)) == (0, 0)
        store.commit({})
        # 16 are free: 9 for good, and 6 or 9 when the next step writes them again.
        assert (is_refused(1), is_refused(2)) == (0, 18)
        put(store, "a", 4 * BLOCK)
        # 12 are free: `b` and `c` 5 for good.
        assert (is_refused(1), is_refused(2)) == (0, 14)
        store.close()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_run_on_a_disk_that_fills_up_ends_before_a_step_and_goes_on_later(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = 120 * MIB
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        one, digest = version_bytes(tmp_path / "free")
        with open_on(disk) as session:
            model = session.wrap(build(SmallGPT))
            optimizer = session.AdamW(model.parameters(), **OPTIONS)
            train(model, optimizer, 0)
            session.save("kept")
            others = disk / "others"
            others.write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096 - one // 4))
            train(model, optimizer, 1)  # in what the data file has from its first growth
            session.commit()
            loss_of(model, 2).backward()
            before = session.stats().write_bytes
            with pytest.raises(StorageError, match="cannot make step 3"):
                optimizer.step()
            assert session.stats().write_bytes == before
        assert inspect_store(disk / "run").step == 2

        others.unlink()
        with open_on(disk, resume=True) as session:
            model = session.wrap(build(SmallGPT))
            optimizer = session.AdamW(model.parameters(), **OPTIONS)
            for step in range(2, 4):
                train(model, optimizer, step)
            assert session.state_digest() == digest
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_plan_that_does_not_fit_says_for_what_and_what_to_do(tmp_path):
    from offload.config import build_config
    from offload.runs.train import run_training

    config = build_config(
        {
            "model": {"layers": 1, "width": 64, "heads": 2, "context": 16},
            "tiers": {"host": {"memory": "8MiB"}, "storage": {"capacity": "30MiB"}},
            "checkpoint": {"save_every": 1, "keep_last": 3},
            "train": {"steps": 9},
        }
    )

    with pytest.raises(PlanError, match=r"2 versions and 3 checkpoints of .*keep_last"):
        run_training(config, run_dir=tmp_path / "run")

    assert not (tmp_path / "run").exists()
