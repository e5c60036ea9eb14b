"""`offload doctor` says what it finds of the machine and of each path."""

import os
from pathlib import Path

import pytest

from offload.runs.checks import Check, guarded
from offload.runs.doctor import run_checks
from offload.runs.path_checks import drain_check, path_checks
from offload.storage.mounts import BlockDevice, Mount, find_device, find_mount

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
    "file size",
    "memory",
    "huge pages",
    "container",
    "NUMA nodes",
]
PATH = ["writable", "file system", "mount options", "O_DIRECT", "flush", "free space", "device"]


def test_a_usable_path_is_ok_and_left_as_it_was(tmp_path):
    report = run_checks([tmp_path])

    assert report.ok
    names = [check.name for check in report.checks]
    assert names[: len(MACHINE)] == MACHINE
    of_path = [name.removeprefix(f"{tmp_path}: ") for name in names[len(MACHINE) :]]
    assert of_path[: len(PATH)] == PATH
    assert of_path[-2:] == ["measured", "drain target"]
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
    assert found["I/O backend"].found.startswith("aiofiles")
    assert found["kernels"].found == "torch"


def test_a_variable_that_names_no_feature_is_what_to_correct(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFLOAD_DISABLE_CPU_FEATURES", "sse")

    report = run_checks([tmp_path])

    found = {check.name: check for check in report.checks}["kernels"]
    assert found.status == "fail"
    assert "`OFFLOAD_DISABLE_CPU_FEATURES`" in found.found
    assert "variable" in found.remedy


def test_a_check_that_cannot_be_made_is_a_failed_check():
    def broken():
        raise OSError("no such device")

    check = guarded("x", broken, remedy="do y")

    assert check == Check(name="x", status="fail", found="OSError: no such device", remedy="do y")


def found_of(path, what):
    (check,) = (each for each in path_checks(path) if each.name == f"{path}: {what}")
    return check


@pytest.mark.parametrize(
    "kind, word",
    [
        ("ext4", None),
        ("xfs", None),
        ("tmpfs", "memory"),
        ("nfs4", "network"),
        ("overlay", "volume"),
        ("btrfs", "chattr"),
        ("lustre", "shared"),
        ("fuse.something", "process"),
    ],
)
def test_each_kind_of_file_system_has_its_remedy(tmp_path, monkeypatch, kind, word):
    mount = Mount(directory=Path("/"), kind=kind, source="s", options="rw")
    monkeypatch.setattr("offload.runs.path_checks.find_mount", lambda _: mount)

    check = found_of(tmp_path, "file system")

    assert check.status == ("ok" if word is None else "warn")
    assert check.remedy is None if word is None else word in check.remedy


@pytest.mark.parametrize("options, status", [("rw,relatime", "ok"), ("rw,sync", "warn")])
def test_mount_options_that_slow_or_endanger_are_named(tmp_path, monkeypatch, options, status):
    mount = Mount(directory=Path("/"), kind="ext4", source="s", options=options)
    monkeypatch.setattr("offload.runs.path_checks.find_mount", lambda _: mount)

    assert found_of(tmp_path, "mount options").status == status


def test_devices_that_turn_lack_discard_or_are_far_from_the_gpu_are_named(tmp_path, monkeypatch):
    device = BlockDevice(
        name="sda",
        is_rotational=True,
        discards=False,
        numa_node=1,
        logical_block_bytes=512,
        scheduler=None,
        model=None,
    )
    monkeypatch.setattr("offload.runs.path_checks.find_device", lambda _: device)
    monkeypatch.setattr("offload.runs.path_checks.gpu_numa_nodes", lambda: [0, None])

    assert found_of(tmp_path, "device").status == "warn"
    assert found_of(tmp_path, "discard").status == "ok"
    assert found_of(tmp_path, "NUMA node").status == "warn"


def test_a_path_that_cannot_flush_fails(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("offload.runs.path_checks.os.fsync", refuse)

    report = run_checks([tmp_path])

    assert not report.ok


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="/dev/shm is no mount of its own")
def test_the_file_system_is_that_of_the_nearest_mount():
    assert find_mount(Path("/dev/shm")).kind == "tmpfs"
    assert find_mount(Path("/proc")).kind == "proc"
    assert find_device(Path("/proc")) is None


def test_a_missing_drain_target_and_one_on_a_path_are_warnings(tmp_path):
    nothing = drain_check(None, [tmp_path])
    beside = drain_check(tmp_path / "not" / "there", [tmp_path])
    apart = drain_check(Path("/proc"), [tmp_path])

    assert (nothing.status, beside.status, apart.status) == ("warn", "warn", "ok")
    assert "checkpoint.drain" in nothing.remedy
    absent = drain_check(Path("/proc/not-there"), [tmp_path])
    assert (absent.status, absent.found) == ("warn", "`/proc/not-there` does not exist")
    assert f"does not exist and lies on the file system of path `{tmp_path}`" in beside.found
