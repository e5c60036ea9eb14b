"""Copies of checkpoints in another directory: complete or invisible, and gone on with."""

import threading

import pytest
from storage_memory import content, memory_of

from offload.errors import StorageError
from offload.storage import drain as drain_module
from offload.storage.drain import Drain, copy_store, drained_copies
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath
from offload.storage.verify import verify

BLOCK = 4096
NUM_RECORDS = 8


def put_all(store, fill):
    for record in range(NUM_RECORDS):
        memory = memory_of(3 * BLOCK + 5, fill + record)
        store.write(str(record), memory, num_bytes=3 * BLOCK + 5).wait()


def require_content(store, fill):
    assert store.records() == [str(i) for i in range(NUM_RECORDS)]
    for record in range(NUM_RECORDS):
        memory = memory_of(3 * BLOCK + 5)
        store.read(str(record), memory).wait()
        assert bytes(memory[: 3 * BLOCK + 5]) == content(3 * BLOCK + 5, fill + record)


@pytest.fixture
def store(store_on_two_paths):
    return store_on_two_paths


@pytest.fixture
def drain(store, tmp_path):
    drain = Drain(store, target=tmp_path / "target")
    yield drain
    drain.close()


def save(store, step):
    put_all(store, fill=step)
    store.commit({"step": step, "metadata": {"note": step}})
    store.save(f"step-{step}")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), KeyError("a fault")])
def test_a_copy_that_fails_in_any_way_is_told_and_nobody_waits_for_it(
    store, drain, caplog, monkeypatch, error
):
    def fail(*_, **__):
        raise error

    save(store, 1)
    with monkeypatch.context() as failing:
        failing.setattr("pathlib.Path.mkdir", fail)
        drain.start("step-1")
        drain.wait()

    (failure,) = drain.failures
    assert failure.startswith("checkpoint `step-1`: ")
    assert ("Traceback" in caplog.text) == isinstance(error, KeyError)
    drain.start("step-1")
    drain.wait()
    assert len(drain.failures) == 1


def test_a_copy_is_a_store_with_the_checkpoints_content(store, drain, tmp_path, engine):
    save(store, 1)

    drain.start("step-1")
    put_all(store, fill=100)  # training goes on
    store.commit({"step": 2})
    drain.wait()

    (copy,) = drained_copies(tmp_path / "target")
    assert (copy.name, copy.step, copy.store_id) == ("step-1", 1, store.store_id)
    opened = BlockStore(copy.root, engine=engine)
    opened.open(read_only=True)
    require_content(opened, fill=1)
    assert opened.head["metadata"] == {"note": 1}
    assert verify(opened).is_ok
    opened.close()


def test_reading_for_a_copy_is_counted_apart(store, drain):
    save(store, 1)
    before = store.stats()

    drain.start("step-1")
    drain.wait()

    after = store.stats()
    assert after.read_bytes == before.read_bytes
    assert after.checkpoint_read_bytes == NUM_RECORDS * 4 * BLOCK


def interrupt_after(monkeypatch, drain, num_records):
    """Ends a copy after some records, as the end of a process would."""
    copied = []
    original = Drain._copy_record

    def copy_record(self, name, record, *args):
        original(self, name, record, *args)
        copied.append(record)
        if len(copied) == num_records:
            drain._is_closing = True

    monkeypatch.setattr(Drain, "_copy_record", copy_record)
    return copied


def test_an_interrupted_copy_is_invisible_and_gone_on_with(store, drain, tmp_path, monkeypatch):
    save(store, 1)
    with monkeypatch.context() as patch:
        copied = interrupt_after(patch, drain, 3)
        drain.start("step-1")
        drain._thread.join()
    drain.close()
    assert len(copied) == 3
    assert drained_copies(tmp_path / "target") == []

    again = Drain(store, target=tmp_path / "target")
    with monkeypatch.context() as patch:
        copied = interrupt_after(patch, again, 1000)
        again.start_unfinished()
        again.wait()
    again.close()

    assert len(copied) == NUM_RECORDS - 3
    assert len(drained_copies(tmp_path / "target")) == 1


def test_commits_in_between_bound_what_is_copied_again(store, drain, monkeypatch, tmp_path, engine):
    save(store, 1)
    monkeypatch.setattr(drain_module, "_COMMIT_BYTES", 2 * (3 * BLOCK + 5))

    drain.start("step-1")
    drain.wait()

    (copy,) = drained_copies(tmp_path / "target")
    opened = BlockStore(copy.root, engine=engine)
    opened.open(read_only=True)
    require_content(opened, fill=1)
    assert not opened.head.get("is_partial")
    opened.close()


def test_a_target_that_fails_is_reported_and_training_goes_on(
    store, drain, tmp_path, monkeypatch, caplog
):
    save(store, 1)
    original = BlockStore.write

    def fail(self, *args, **options):
        if self is store:
            return original(self, *args, **options)
        raise StorageError("no space there", errno=28)

    monkeypatch.setattr(BlockStore, "write", fail)
    drain.start("step-1")
    drain.wait()

    assert "no space there" in drain.failures[0]
    assert "training goes on" in caplog.text
    assert drained_copies(tmp_path / "target") == []
    put_all(store, fill=2)
    store.commit({"step": 2})


def test_only_the_last_copies_of_this_store_are_kept(store, tmp_path):
    other = tmp_path / "target" / "mine"
    other.mkdir(parents=True)
    (other / "notes").write_text("kept")
    drain = Drain(store, target=tmp_path / "target", keep_last=2)
    for step in (1, 2, 3):
        save(store, step)
        drain.start(f"step-{step}")
    drain.wait()
    drain.close()

    assert [copy.name for copy in drained_copies(tmp_path / "target")] == ["step-2", "step-3"]
    assert (other / "notes").read_text() == "kept"


def test_close_leaves_no_thread(store, drain):
    save(store, 1)
    drain.start("step-1")

    drain.close()
    drain.close()

    assert not [t for t in threading.enumerate() if t.name == "offload-drain"]


def test_a_rate_limit_keeps_the_bytes(store, tmp_path):
    save(store, 1)
    drain = Drain(store, target=tmp_path / "target", bytes_per_s=10 << 20)

    drain.start("step-1")
    drain.wait()
    drain.close()

    assert len(drained_copies(tmp_path / "target")) == 1


def test_a_store_is_made_from_a_copy(store, drain, tmp_path, engine):
    save(store, 3)
    drain.start("step-3")
    drain.wait()
    (copy,) = drained_copies(tmp_path / "target")
    source = BlockStore(copy.root, engine=engine)
    source.open(read_only=True)
    target = BlockStore(
        [StorePath(root=tmp_path / name) for name in ("new-a", "new-b")],
        engine=engine,
        block_bytes=BLOCK,
    )
    target.create()

    copy_store(source, target)

    require_content(target, fill=3)
    assert target.head["step"] == 3
    assert "drained_from" not in target.head
    source.close()
    target.close()
