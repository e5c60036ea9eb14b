"""`offload bench io`: its figures, its files, and what it leaves behind."""

import io
import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from offload._native import aio
from offload.bench.io import IoProgress
from offload.bench.io_options import IoOptions, parse_options
from offload.bench.io_report import duplex
from offload.bench.stream import Budget, Stream
from offload.bench.sustained import is_steady
from offload.bench.together import measure_together
from offload.cli.app import run
from offload.cli.bench_tables import LiveLine
from offload.errors import ConfigError
from offload.plan.machine_profile import MARK, read_profile
from offload.sizes import KIB, MIB
from offload.storage.engine import Engine, PathSettings
from offload.storage.faults import Fault, FaultPlan
from offload.storage.file import open_file
from offload.storage.transfer import Operation

pytestmark = pytest.mark.slow  # seconds in all; `make test` has others of their kind

PATH_KEYS = {
    "path",
    "filesystem",
    "device",
    "backend",
    "direct",
    "block_bytes",
    "queue_depth",
    "read_bytes_per_s",
    "write_bytes_per_s",
    "mixed_read_bytes_per_s",
    "mixed_write_bytes_per_s",
    "duplex",
    "round_trip_bytes_per_s",
    "cpu_s_per_gib",
    "spread",
}
SMALL = ("--size", "8MiB", "--runs", "2")


@dataclass
class Paths:
    first: str
    second: str


@pytest.fixture
def paths(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return Paths(first=str(tmp_path / "a"), second=str(tmp_path / "b"))


def bench(capsys, *arguments):
    code = run(["bench", "io", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_key_of_the_interface_is_there(paths, capsys):
    code, result = bench(capsys, paths.first, *SMALL)

    assert code == 0
    (path,) = result["paths"]
    assert path.keys() >= PATH_KEYS
    for name in ("read", "write", "mixed_read", "mixed_write", "round_trip"):
        assert path[f"{name}_bytes_per_s"] > 0
    assert path["spread"] >= 1
    assert path["path"] == paths.first
    assert set(result["together"].values()) == {None}
    assert result["environment"]["kernel"]


def test_two_paths_are_measured_together(paths, capsys):
    code, result = bench(capsys, paths.first, paths.second, *SMALL)

    assert code == 0
    together = result["together"]
    assert [path["path"] for path in result["paths"]] == [paths.first, paths.second]
    assert together["read_bytes_per_s"] > 0
    assert together["write_bytes_per_s"] > 0
    assert 0 < together["first_done_s"] <= together["last_done_s"]


def test_what_was_not_measured_is_null(paths, capsys):
    _, result = bench(capsys, paths.first, "--size", "8MiB", "--runs", "1", "--rw", "read")

    (path,) = result["paths"]
    assert path["read_bytes_per_s"] > 0
    for key in ("write_bytes_per_s", "mixed_read_bytes_per_s", "duplex", "spread"):
        assert path[key] is None
    assert path["round_trip_bytes_per_s"] is None


def test_the_settings_in_use_are_reported(paths, capsys):
    settings = ("--ioengine", "aiofiles", "--bs", "64KiB", "--iodepth", "3", "--buffered")

    _, result = bench(capsys, paths.first, *SMALL, *settings)

    (path,) = result["paths"]
    assert path["backend"] == "aiofiles"
    assert (path["block_bytes"], path["queue_depth"]) == (64 * KIB, 3)
    assert path["direct"] is False
    assert path["cached"] is True


def test_bytes_are_those_that_the_kernel_moved(paths, tmp_path):
    with Engine(queue_depth=4, block_bytes=64 * KIB) as engine:
        file = open_file(tmp_path / "file", create=True, direct=False)
        stream = Stream(engine, file, size_bytes=4 * MIB, block_bytes=64 * KIB, queue_depth=4)
        stream.move((Operation.WRITE,), Budget(4 * MIB), flush=True)
        both = stream.move((Operation.READ, Operation.WRITE), Budget(6 * MIB))
        stats = engine.stats()
        file.close()

    assert (both.read_bytes, both.write_bytes) == (3 * MIB, 3 * MIB)
    assert both.samples[-1].num_bytes == 6 * MIB
    assert (stats.read_bytes, stats.write_bytes) == (3 * MIB, 7 * MIB)


def test_nothing_is_left_on_the_paths(paths, capsys):
    bench(capsys, paths.first, *SMALL)

    assert _names_in(paths.first) == []


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_no_end_of_the_process_leaves_a_file(paths, kind):
    command = [sys.executable, "-m", "offload", "bench", "io", paths.first]
    process = subprocess.Popen(
        [*command, "--size", "8MiB", "--runs", "100000"], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not _has_unnamed_file(process.pid, paths.first) and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        process.send_signal(kind)
        _, message = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()

    assert _names_in(paths.first) == []
    if kind == signal.SIGINT:
        assert process.returncode == 130
        assert b"interrupted" in message


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_one_line_on_a_terminal_and_gone_in_the_end(monkeypatch, is_terminal):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    progress = {"path": "/mnt/a", "pattern": "read", "total_bytes": 4 * MIB}

    with LiveLine(stream) as live:
        live(IoProgress(done_bytes=1 * MIB, bytes_per_s=2e9, **progress))
        live(IoProgress(done_bytes=4 * MIB, bytes_per_s=1e9, **progress))

    text = stream.getvalue()
    shown = [line.rstrip() for line in text.split("\r") if line.strip()]
    lines = ["/mnt/a  read   25%  2.00 GB/s", "/mnt/a  read  100%  1.00 GB/s"]
    assert shown == (lines if is_terminal else [])
    assert "\n" not in text


def _names_in(directory):
    return [entry.name for entry in Path(directory).iterdir()]


def _has_unnamed_file(pid, directory):
    try:
        targets = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(each.startswith(directory) and each.endswith(" (deleted)") for each in targets)


def test_a_path_without_room_is_refused_and_left_as_it_was(paths, capsys):
    code, result = bench(capsys, paths.first, "--size", "900TiB")

    assert code == 2
    assert result["error"]["type"] == "ConfigError"
    assert "free" in result["error"]["message"]
    assert _names_in(paths.first) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"rw": "randread"},
        {"bs": "0"},
        {"iodepth": "5000"},
        {"ioengine": "sync"},
        {"size": "many"},
        {"runs": 0},
        {"tune": True},  # and `rw` is only "read"
        {"tune": True, "rw": "write,read,rw", "bs": "64KiB,65537"},
        {"max_bytes": "1GiB"},  # and no `sustained`
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, wrong):
    plain = {
        "size": "8MiB",
        "rw": "read",
        "bs": None,
        "iodepth": None,
        "ioengine": "auto",
        "buffered": False,
        "runs": 1,
        "tune": False,
        "sustained": False,
        "max_bytes": None,
    }
    parse_options([tmp_path], **plain)

    with pytest.raises(ConfigError, match="offload bench io --help"):
        parse_options([tmp_path], **(plain | wrong))
    with pytest.raises(ConfigError, match="PATH"):
        parse_options([tmp_path / "missing"], **plain)


def test_tune_writes_the_profile_that_later_runs_use(paths, tmp_path, capsys, monkeypatch):
    file = tmp_path / "machine.toml"
    sweep = ("--bs", "64KiB,128KiB", "--iodepth", "2,3", "--ioengine", "threads,aiofiles")
    monkeypatch.setenv("OFFLOAD_MACHINE", str(file))

    code, tuned = bench(capsys, paths.first, *SMALL, *sweep, "--tune")
    _, later = bench(capsys, paths.first, *SMALL)

    assert code == 0
    assert tuned["machine_file"] == str(file)
    profile = read_profile().find(f"{paths.first}/some/store")
    (found,), (used,) = tuned["paths"], later["paths"]
    for key in ("backend", "block_bytes", "queue_depth"):
        assert getattr(profile, key) == found[key] == used[key]
    # The grid with the first backend, then the three best with both.
    assert len(found["sweep"]) == 4 + 3 * (2 if aio.available() else 1)
    assert later["machine_file"] is None


def test_tune_keeps_other_paths_and_replaces_no_foreign_file(paths, tmp_path, capsys):
    file = tmp_path / "machine.toml"
    options = (*SMALL, "--tune", "--bs", "64KiB", "--iodepth", "2", "--machine", str(file))
    options += ("--ioengine", "threads" if aio.available() else "aiofiles")
    bench(capsys, paths.first, *options)
    bench(capsys, paths.second, *options)
    known = [profile.path for profile in read_profile(file).paths]
    text = file.read_text(encoding="utf-8")
    file.write_text("mine = true\n", encoding="utf-8")
    code, result = bench(capsys, paths.first, *options)

    assert known == [paths.first, paths.second]
    assert text.startswith(MARK)
    assert code == 2
    assert "mine" in file.read_text(encoding="utf-8")
    assert str(file) in result["error"]["message"]


def test_the_plot_is_written_and_replaces_no_foreign_file(paths, tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    options = (*SMALL, "--bs", "64KiB,128KiB", "--iodepth", "1,4", "--plot", str(plot))

    for _ in range(2):
        code, _ = bench(capsys, paths.first, *options)
        assert code == 0
    text = plot.read_text(encoding="utf-8")
    plot.write_text("<svg>mine</svg>", encoding="utf-8")
    code, _ = bench(capsys, paths.first, *options)

    for part in ("64 KiB", "128 KiB", "depth 4", "over time", paths.first):
        assert part in text
    assert code == 2
    assert plot.read_text(encoding="utf-8") == "<svg>mine</svg>"


def test_sustained_stops_at_the_number_of_bytes(paths, capsys):
    _, result = bench(
        capsys, paths.first, "--size", "8MiB", "--runs", "1", "--sustained", "--max-bytes", "24MiB"
    )

    sustained = result["paths"][0]["sustained"]
    assert sustained["max_bytes"] == 24 * MIB
    assert 24 * MIB <= sustained["written_bytes"] <= 25 * MIB
    assert sustained["is_steady"] is False
    assert sustained["write_bytes_per_s"] is None


def test_a_rate_is_steady_when_it_neither_spreads_nor_drifts():
    assert is_steady([9.0, 5.0, 1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 1.0, 0.98, 1.0])
    assert not is_steady([1.0] * 7)
    assert not is_steady([1.0] * 7 + [1.2])
    assert not is_steady([1.0 + 0.012 * i for i in range(8)])


def test_duplex_is_0_for_one_shared_rate_and_1_for_two():
    half = 1 / (1 / 3.0 + 1 / 2.0)

    assert duplex(3.0, 2.0, half, half) == pytest.approx(0)
    assert duplex(3.0, 2.0, 2.0, 2.0) == pytest.approx(1)
    assert duplex(3.0, None, 2.0, 2.0) is None


@pytest.mark.stress  # a figure of a quiet machine: other work takes its share of the rates
@pytest.mark.skipif(not aio.available(), reason="the emulated paths need the extension")
@pytest.mark.parametrize("pattern", ["write", "read"])
def test_unequal_paths_together_reach_the_sum_of_their_rates(paths, pattern):
    rates = {paths.first: 200_000_000, paths.second: 60_000_000}
    settings = [
        PathSettings(
            root=Path(root),
            backend="fault",
            queue_depth=4,
            block_bytes=128 * KIB,
            faults=FaultPlan(read_bytes_per_s=rate, write_bytes_per_s=rate, burst_bytes=256 * KIB),
        )
        for root, rate in rates.items()
    ]

    assert max(_share_of_sum(settings, pattern, sum(rates.values())) for _ in range(3)) > 0.95


def _share_of_sum(settings, pattern, rate_of_all):
    with ExitStack() as stack:
        files = [open_file(each.root / "file", create=True, direct=False) for each in settings]
        for file in files:
            stack.callback(file.close)
        engine = stack.enter_context(Engine(paths=settings))
        streams = [
            Stream(engine, file, size_bytes=16 * MIB, block_bytes=128 * KIB, queue_depth=4)
            for file in files
        ]
        for stream in streams:
            stream.move((Operation.WRITE,), Budget(stream.size_bytes))
        found = measure_together(
            streams, (pattern,), num_bytes=128 * MIB, on_sample=lambda *_: None
        )
    return getattr(found, pattern) / rate_of_all


@pytest.mark.skipif(not aio.available(), reason="the emulated path needs the extension")
def test_an_error_of_one_path_ends_the_measurement(paths):
    settings = [
        PathSettings(root=Path(paths.first), backend="threads"),
        PathSettings(
            root=Path(paths.second),
            backend="fault",
            faults=FaultPlan(faults=(Fault(operation="read", error=5),)),
        ),
    ]

    with pytest.raises(OSError, match="EIO"):
        _share_of_sum(settings, "read", 1)


def test_options_have_defaults(tmp_path):
    options = IoOptions(paths=(tmp_path,))

    assert options.patterns == ("write", "read", "rw")
    assert not options.sweeps
