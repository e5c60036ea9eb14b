import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.cli.app import run
from offload.errors import ConfigError, StoreError
from offload.runs.cleaning import clean
from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.testing.io_cases import aligned

BLOCK = 4096


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


def make_store(root, engine, *, commit=True):
    store = BlockStore(root, engine=engine, block_bytes=BLOCK)
    store.create()
    store.write("a", memoryview(aligned(BLOCK))).wait()
    if commit:
        store.commit({"step": 7})
        store.save("kept")
    return store


def test_dead_stores_are_listed_with_size_and_age_and_nothing_is_deleted(tmp_path, engine):
    make_store(tmp_path / "runs" / "old", engine).close()
    make_store(tmp_path / "aborted", engine, commit=False).close()
    (tmp_path / "notes").mkdir()
    before = sorted(tmp_path.rglob("*"))

    found = clean(tmp_path)

    by_name = {store.root.name: store for store in found.dead}
    assert set(by_name) == {"aborted", "old"}
    assert by_name["old"].step == 7 and by_name["old"].checkpoints == ("kept",)
    assert by_name["old"].num_bytes > 0 and by_name["old"].age_s >= 0
    assert not by_name["aborted"].has_commit
    assert found.in_use == found.deleted == []
    assert sorted(tmp_path.rglob("*")) == before


def test_only_what_is_named_is_deleted(tmp_path, engine):
    for name in ("a", "b"):
        make_store(tmp_path / name, engine).close()

    found = clean(tmp_path, delete=[tmp_path / "a"])

    assert [store.root for store in found.deleted] == [tmp_path / "a"]
    assert [store.root for store in found.dead] == [tmp_path / "b"]
    assert not (tmp_path / "a").exists()


def test_a_store_in_use_is_not_deleted(tmp_path, engine):
    store = make_store(tmp_path / "a", engine)

    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        clean(tmp_path, delete=[tmp_path / "a"])

    assert [found.root for found in clean(tmp_path).in_use] == [tmp_path / "a"]
    store.close()


def test_what_is_no_store_or_elsewhere_is_not_deleted(tmp_path, engine):
    make_store(tmp_path / "elsewhere", engine).close()
    (tmp_path / "here" / "notes").mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")

    for name in ("notes", "link", "../elsewhere", "absent"):
        with pytest.raises((StoreError, ConfigError), match="cannot delete"):
            clean(tmp_path / "here", delete=[tmp_path / "here" / name])

    assert (tmp_path / "elsewhere").is_dir()


def test_what_a_killed_process_left_is_found_and_explained(tmp_path, capsys):
    code = (
        "import os,sys,pathlib\n"
        "from offload.storage.engine import Engine\n"
        "from offload.storage.store import BlockStore\n"
        "engine = Engine(); engine.open()\n"
        f"store = BlockStore(pathlib.Path({str(tmp_path / 's')!r}), engine=engine)\n"
        "store.create(); store.commit({'step': 3}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)

    assert run(["clean", str(tmp_path), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [store["step"] for store in found["dead"]] == [3]
    assert run(["clean", str(tmp_path)]) == 0
    assert "--delete STORE" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["file", "nothing"])
def test_only_a_directory_is_looked_through(tmp_path, name):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=rf"cannot look for stores in .*{name}`.*correct the"):
        clean(tmp_path / name)


def test_nothing_is_deleted_where_one_of_the_names_is_no_store(tmp_path, engine):
    make_store(tmp_path / "a", engine).close()
    (tmp_path / "run").mkdir()

    with pytest.raises(ConfigError, match="cannot delete `run`"):
        clean(tmp_path, delete=[Path("a"), Path("run")])

    assert (tmp_path / "a").is_dir()
