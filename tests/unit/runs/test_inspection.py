"""Which store a path means."""

from pathlib import Path

import pytest
from parity.models import SmallGPT, build
from parity.sessions import open_session

import offload
from offload.errors import ConfigError, StoreError
from offload.runs.inspection import inspect_store, verify_store


def commit(path: Path, *, drain: Path | None = None) -> str:
    """Returns the digest of a store in `path`, which is copied to `drain`."""
    config = {"checkpoint": {"drain": str(drain)}} if drain else {}
    with offload.Session(config, host_memory=1 << 20, store=path) as session:
        session.wrap(build(SmallGPT))
        session.save("begun")
        assert session.wait_drained() == []
        return session.state_digest()


def test_a_directory_of_stores_is_refused_with_the_stores_and_how_to_name_one(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "runs" / "a" / "store", tmp_path / "runs" / "b"
    digest = commit(one)
    commit(other)

    for look in (inspect_store, verify_store):
        with pytest.raises(ConfigError, match="cannot tell which store") as raised:
            look(tmp_path)

    assert f"found `{one}`, `{other}` in it" in str(raised.value)
    assert str(raised.value).endswith(f"name one, such as `{one}`")  # whichever command it was
    assert inspect_store(one).digest == digest


def test_a_directory_of_copied_checkpoints_is_refused_likewise(tmp_path: Path) -> None:
    digest = commit(tmp_path / "store", drain=tmp_path / "backup")

    with pytest.raises(ConfigError, match=r"found `(.*)` in it") as raised:
        inspect_store(tmp_path / "backup")

    named = str(raised.value).rpartition("such as `")[2].rstrip("`")
    assert inspect_store(Path(named)).digest == digest


def test_a_directory_without_any_store_is_refused_as_such(tmp_path: Path) -> None:
    with open_session(tmp_path / "s") as session:
        session.wrap(build(SmallGPT))

    with pytest.raises(StoreError, match="before its first commit"):
        inspect_store(tmp_path / "s" / "storage-storage")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="no store at"):
        inspect_store(tmp_path / "empty")
