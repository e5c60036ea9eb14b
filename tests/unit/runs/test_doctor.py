"""`offload doctor` says what it finds of the machine and of each path."""

import os
from pathlib import Path

import pytest

from offload.runs.checks import Check, guarded
from offload.runs.doctor import run_checks
from offload.storage.mounts import file_system_type

MACHINE = [
    "python",
    "offload",
    "torch",
    "numpy",
    "extension",
    "I/O backend",
    "kernels",
    "open files",
    "locked memory",
    "aio requests",
    "memory",
    "huge pages",
]


def test_a_usable_path_is_ok_and_left_as_it_was(tmp_path):
    report = run_checks([tmp_path])

    assert report.ok
    names = [check.name for check in report.checks]
    assert names[: len(MACHINE)] == MACHINE
    assert names[len(MACHINE) :] == [
        f"{tmp_path}: {what}" for what in ("writable", "file system", "O_DIRECT", "free space")
    ]
    assert list(tmp_path.iterdir()) == []


def test_each_check_has_the_four_keys(tmp_path):
    values = run_checks([tmp_path]).to_json()

    assert set(values) == {"ok", "checks"}
    for check in values["checks"]:
        assert set(check) == {"name", "status", "found", "remedy"}
        assert check["status"] in ("ok", "warn", "fail")
        assert check["found"]


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_path_that_is_no_directory_fails_with_a_remedy(tmp_path, kind):
    path = tmp_path / kind
    if kind == "file":
        path.touch()

    report = run_checks([path])

    failed = [check for check in report.checks if check.status == "fail"]
    assert not report.ok
    assert [check.name for check in failed] == [f"{path}: writable"]
    assert failed[0].remedy


def test_a_path_where_nothing_can_be_made_fails():
    report = run_checks([Path("/proc")])

    assert not report.ok


def test_the_pure_fallbacks_are_a_warning_not_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFLOAD_PURE", "1")

    report = run_checks([tmp_path])

    found = {check.name: check for check in report.checks}
    assert report.ok
    assert found["extension"].status == "warn"
    assert found["I/O backend"].found == "aiofiles"
    assert found["kernels"].found == "torch"


def test_a_check_that_cannot_be_made_is_a_failed_check():
    def broken():
        raise OSError("no such device")

    check = guarded("x", broken, remedy="do y")

    assert check == Check(name="x", status="fail", found="OSError: no such device", remedy="do y")


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="/dev/shm is no mount of its own")
def test_the_file_system_is_that_of_the_nearest_mount():
    assert file_system_type(Path("/dev/shm")) == "tmpfs"
    assert file_system_type(Path("/proc")) == "proc"
