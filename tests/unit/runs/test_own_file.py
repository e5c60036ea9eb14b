"""A file that is written anew where it is ours, and left alone with a clear error elsewhere."""

from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.runs.own_file import OwnFile

MARK = "# ours"


def own(path):
    return OwnFile(path=path, what="the list", mark=MARK, remedy="name another")


def test_what_was_written_is_replaced_as_a_whole(tmp_path):
    file = own(tmp_path / "list")

    file.require_writable()
    assert list(tmp_path.iterdir()) == []
    file.write(f"{MARK}\nlong")
    file.write(f"{MARK}\n1")

    assert file.read() == f"{MARK}\n1"
    assert [each.name for each in tmp_path.iterdir()] == ["list"]


@pytest.mark.parametrize("kind", ["others", "directory", "link", "nowhere", "proc"])
def test_a_place_that_is_not_ours_is_refused_and_left_as_it_is(tmp_path, kind):
    path = tmp_path / "list"
    match kind:
        case "others":
            path.write_text("mine")
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "gone")
        case "nowhere":
            path = tmp_path / "none" / "list"
        case "proc":  # a directory where nobody makes files, root or not
            path = Path("/proc/list")
    before = sorted(tmp_path.iterdir())

    for act in (own(path).require_writable, lambda: own(path).write(MARK)):
        with pytest.raises(ConfigError, match=r"cannot write the list .*found .*; name another"):
            act()

    assert sorted(tmp_path.iterdir()) == before
    assert kind != "others" or path.read_text() == "mine"
