"""A smoke run of `offload bench optim`, and what it counts."""

import json
from pathlib import Path

import psutil
import pytest

from offload.bench.optim import run_optim_bench
from offload.bench.optim_options import parse_options
from offload.bench.plot_file import plot_file
from offload.cli.app import run
from offload.errors import ConfigError, PlanError
from offload.optim.kernels import kernel_names
from offload.plan.machine_profile import read_profile

pytestmark = pytest.mark.slow  # seconds in all; `make test` has others of their kind

RESULT_KEYS = {
    "optimizer",
    "codec",
    "gradient_dtype",
    "parameter_dtype",
    "isa",
    "threads",
    "parameters",
    "seconds",
    "parameters_per_s",
    "bytes_per_parameter",
    "bytes_per_s",
    "memcpy_bytes_per_s",
    "ratio_to_memcpy",
}


def test_the_command_prints_the_promised_keys(tmp_path, capsys):
    plot = tmp_path / "plot.svg"

    sizes = ["--parameters", "1e5", "--rounds", "1", "--threads", "1", "--threads", "2"]
    optimizers = ["--optimizer", "adamw", "--optimizer", "lion"]
    profile = tmp_path / "machine.toml"
    files = ["--plot", str(plot), "--tune", "--machine", str(profile)]
    code = run(["bench", "optim", *sizes, *optimizers, *files, "--json"])

    values = json.loads(capsys.readouterr().out)
    assert code == 0
    assert len(values["results"]) == 8
    assert all(result.keys() >= RESULT_KEYS for result in values["results"])
    assert {r["isa"] for r in values["results"]} == {kernel_names()[0]}
    assert values["torch"].keys() >= {
        "fused_parameters_per_s",
        "fused_with_casts_parameters_per_s",
        "fused_with_new_gradients_parameters_per_s",
    }
    assert plot.read_text().startswith("<svg")
    known = read_profile(profile)
    assert {(k.rule, k.codec, k.threads) for k in known.kernels} == {
        (r["optimizer"], r["codec"], r["threads"]) for r in values["results"]
    }
    assert sorted(memory.threads for memory in known.memory) == [1, 2]  # slowest first


def test_bytes_are_those_that_the_pass_reads_and_writes():
    options = parse_options(parameters="1000", optimizer=["adamw", "sgd"], rounds=1)

    results = run_optim_bench(options).results

    found = {(r.optimizer, r.codec): r.bytes_per_parameter for r in results}
    # docs/numerics.md and the layout of state: bf16 parameters and gradients.
    assert found == {
        ("adamw", "split"): 26,
        ("adamw", "fp32"): 28,
        ("sgd", "split"): 10,
        ("sgd", "fp32"): 12,
    }
    for result in results:
        expected = 1000 * result.bytes_per_parameter / result.seconds
        assert result.bytes_per_s == pytest.approx(expected)
        if result.bare_bytes_per_s is not None:
            ratio = result.bytes_per_s / result.bare_bytes_per_s
            assert result.ratio_to_bare == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parameters": "none"}, "--parameters"),
        ({"parameters": "1.5"}, "a whole number"),
        ({"parameters": "0"}, "1 or more"),
        ({"optimizer": ["muon"]}, "one of adamw"),
        ({"codec": ["zip"]}, "one of split, fp32"),
        ({"isa": ["sse"]}, "--isa"),
        ({"threads": [0]}, "--threads"),
        ({"codec": ["split"], "parameter_dtype": "float16"}, "cannot encode"),
        ({"rounds": 0}, "--rounds"),
    ],
)
def test_wrong_options_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        parse_options(**wrong)


def test_more_parameters_than_free_memory_holds_are_refused(capsys):
    code = run(["bench", "optim", "--parameters", "1e12", "--rounds", "1"])

    assert code == 2
    assert "expected at least 4" in (said := capsys.readouterr().err)  # about 50 bytes of each
    assert "measuring" not in said
    assert "lower `--parameters`" in said


def test_memory_is_refused_where_only_what_torch_takes_is_too_much(monkeypatch):
    cases = parse_options(parameters="1e6", codec=["split"], rounds=1)
    free = psutil.virtual_memory()._replace(available=40_000_000)  # between 22 and 46 MB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)

    with pytest.raises(PlanError, match="expected at least 4"):
        run_optim_bench(cases)


def test_a_profile_that_is_not_written_is_refused(tmp_path, capsys):
    code = run(["bench", "optim", "--machine", str(tmp_path / "machine.toml")])

    assert code == 2
    assert "expected `--tune` beside it" in capsys.readouterr().err


def test_a_plot_overwrites_only_plots_and_is_refused_before_anything_is_measured(tmp_path):
    mine = tmp_path / "mine.svg"
    mine.write_text("<svg>mine</svg>")

    for file in (
        mine,
        tmp_path / "plot.png",
        tmp_path / "none" / "plot.svg",
        Path("/proc/plot.svg"),
    ):
        with pytest.raises(ConfigError, match=r"cannot write the plot .*expected.*--plot"):
            plot_file(file)

    assert mine.read_text() == "<svg>mine</svg>"
