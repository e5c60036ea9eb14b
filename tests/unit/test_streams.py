"""A run whose output nobody reads, and processes that are started without standard streams."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offload.cli.app import run
from offload.cli.output import Output
from offload.errors import StorageError
from offload.runs.interrupt import StopRequest

SMALL = Path(__file__).parents[2] / "examples" / "small.toml"
TINY = (
    "data.source=files",
    f'data.files=["{argparse.__file__}"]',
    "model.layers=1",
    "model.width=32",
    "model.heads=1",
    "model.context=32",
    "train.steps=4",
)


@pytest.fixture
def broken():
    """A text stream whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_goes_on_where_nobody_reads_its_lines(tmp_path, monkeypatch, capsys, broken, as_json):
    monkeypatch.setattr("offload.runs.train.probe_run", lambda *_: None)  # takes seconds
    monkeypatch.setattr(sys, "stderr" if as_json else "stdout", broken)
    json_option = ["--json"] if as_json else []

    code = run(["train", str(SMALL), *TINY, "--run-dir", str(tmp_path / "run"), *json_option])
    printed = capsys.readouterr()

    metrics = tmp_path / "run" / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert code == 0
    assert steps == [1, 2, 3, 4]
    if as_json:
        assert json.loads(printed.out)["losses"]
    else:
        assert printed.err.count("the lines of steps can't be printed any more (Broken pipe)") == 1
        assert "Traceback" not in printed.err


def test_lines_of_a_measurement_that_nobody_reads_refer_to_no_file(
    tmp_path, monkeypatch, capsys, broken
):
    monkeypatch.setattr("offload.runs.train.probe_run", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", broken)

    run(["bench", "step", str(SMALL), *TINY])
    said = capsys.readouterr().err

    assert "can't be printed any more (Broken pipe): the run goes on, and its result has" in said
    assert "metrics.jsonl" not in said


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_result_that_cannot_be_printed_is_an_error_in_one_line(monkeypatch, capsys, option):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)

        code = run(["config", "show", *option])

        assert code == 1
        assert capsys.readouterr().err == (
            "error: cannot print the result: expected standard output to take it, found No space "
            "left on device; what was done stays done\n"
        )


def test_progress_that_nobody_reads_ends_only_what_prints_its_result_there(capsys, broken):
    reads_nothing = Output(as_json=False, stdout=broken, stderr=sys.stderr)
    with pytest.raises(StorageError, match="cannot print the result"):
        reads_nothing.note("measuring")
    reads_nothing.report(RuntimeError("of another kind"))

    assert capsys.readouterr().err.endswith("error: of another kind\n")


def test_progress_beside_json_that_nobody_reads_ends_nothing(capsys, broken):
    output = Output(as_json=True, stdout=sys.stdout, stderr=broken)
    output.note("measuring")
    output.report(RuntimeError("of another kind"))

    assert json.loads(capsys.readouterr().out)["error"]["message"] == "of another kind"


def test_a_command_without_standard_streams_does_what_it_does(tmp_path):
    code = (
        "import os, sys\n"
        "from offload.cli import main\n"
        f"fd = os.open({str(tmp_path / 'fds')!r}, os.O_CREAT | os.O_RDWR)\n"
        "assert fd <= 2, fd\n"  # which a file of a store would have been
        "os.close(fd)\n"
        "import offload.cli.app as app\n"
        f"app.run = lambda _: os.open({str(tmp_path / 'fds')!r}, os.O_RDWR) <= 2\n"
        "main()\n"
    )

    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code], check=False
    )

    assert done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_for_a_stop_and_one_that_is_ignored_stays_so(number):
    previous = signal.getsignal(number)
    try:
        signal.signal(number, signal.SIG_DFL)  # in the background a shell has some ignored
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            assert stop.signal_name == number.name
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            assert not stop.is_set
    finally:
        signal.signal(number, previous)
