"""A smoke run of `bench update`: its keys, its bytes and its bits."""

import json
from pathlib import Path

import pytest

from offload.bench.update import bench_update
from offload.bench.update_engine import EngineUpdates
from offload.bench.update_io import engines_of
from offload.bench.update_options import PARAMETER_ELEMENTS, UpdateOptions, made_up_layout
from offload.bench.update_room import host_plan, least_need
from offload.cli.app import run
from offload.errors import ConfigError, PlanError
from offload.optim.early import EarlyUpdates
from offload.plan.machine import Machine, PathRates
from offload.plan.machine_profile import MachineProfile, PathProfile

KEYS = {
    "update_s", "step_s", "read_bytes_per_step", "write_bytes_per_step",
    "formula_read_bytes_per_step", "formula_write_bytes_per_step", "cache_hit_rate", "bound_s",
    "achieved_over_bound", "update_bound_s", "update_achieved_over_bound", "parameters_per_s",
    "paths", "state_digest", "others_cpu_share",
}  # fmt: skip
PARAMETERS = 3 * (1 << 20) + 5


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    """Rates without a measurement, which takes seconds."""

    monkeypatch.setattr("offload.bench.update.probe_machine", lambda paths, **_: rates_of(paths))


def rates_of(directories):
    rates = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9, "mixed_bytes_per_s": 5e8}
    return Machine(
        paths=tuple(PathRates(path=str(d), **rates) for d in directories),
        copy_bytes_per_s=1e10,
        update_parameters_per_s=1e9,
    )


def paths_of(tmp_path, *names):
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.mkdir(exist_ok=True)
    return paths


def measure(paths, *, memory=40 << 20, parameters=PARAMETERS, steps=1, **options):
    return bench_update(
        UpdateOptions(
            parameters=parameters, paths=paths, host_memory_bytes=memory, steps=steps, **options
        )
    )


def test_the_command_prints_the_keys_and_leaves_nothing(tmp_path, capsys):
    a, b = paths_of(tmp_path, "a", "b")

    code = run(
        ["bench", "update", "--parameters", str(PARAMETERS), "--path", str(a), "--path", str(b),
         "--host-memory", "40MiB", "--steps", "2", "--compute-s", "0.01", "--json"]
    )  # fmt: skip

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert set(found) >= KEYS
    assert found["read_bytes_per_step"] == pytest.approx(10 * PARAMETERS, rel=0.01)
    assert found["write_bytes_per_step"] == pytest.approx(10 * PARAMETERS, rel=0.01)
    assert found["step_s"] >= found["update_s"] + 0.01
    assert [moved["path"] for moved in found["paths"]] == [str(a), str(b)]
    assert all(moved["write_bytes"] > 0 for moved in found["paths"])
    assert list(a.iterdir()) == list(b.iterdir()) == []


def test_no_choice_changes_the_state(tmp_path):
    a, b = paths_of(tmp_path, "a", "b")

    digests = {
        measure([a]).state_digest,
        measure([a, b]).state_digest,
        measure([a, b], striping="modulo:2:1", commit_every=1).state_digest,
        measure([a, b], striping="single", codec="fp32").state_digest,
    }

    assert len(digests) == 1


def test_a_baseline_moves_its_own_bytes_and_computes_the_same_bits(tmp_path):
    a, b = paths_of(tmp_path, "a", "b")
    engine = measure([a, b], order="alternating")

    deepspeed = measure([a, b], baseline="deepspeed-like")
    mlp = measure([a, b], baseline="mlp-like", memory=110 << 20)
    both = measure([a, b], baseline="mlp-like")
    single = measure([a], baseline="mlp-like")

    assert engine.state_digest == deepspeed.state_digest == mlp.state_digest
    assert single.state_digest == both.state_digest == mlp.state_digest
    assert both.paths[0].write_bytes > both.paths[1].write_bytes > 0
    assert deepspeed.read_bytes_per_step == pytest.approx(16 * PARAMETERS, rel=0.01)
    assert deepspeed.write_bytes_per_step == pytest.approx(16 * PARAMETERS, rel=0.01)
    assert len(deepspeed.paths) == 1
    assert mlp.formula_read_bytes_per_step == pytest.approx(mlp.read_bytes_per_step, rel=0.05)
    assert max(mlp.read_bytes_per_step, mlp.write_bytes_per_step) < 12 * PARAMETERS


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("baseline", ["engine", "mlp-like"])
def test_with_unequal_records_any_number_of_alternating_steps_moves_the_bytes_of_the_formula(
    tmp_path, baseline, steps
):
    (path,) = paths_of(tmp_path, "a")
    parameters = 9 * (1 << 20) // 2  # the last record is half of the others

    found = measure(
        [path],
        order="alternating",
        baseline=baseline,
        parameters=parameters,
        memory=64 << 20,
        steps=steps,
    )

    assert 0 < found.cache_hit_rate < 1
    for way in ("read", "write"):
        moved = getattr(found, f"{way}_bytes_per_step")
        assert moved == pytest.approx(getattr(found, f"formula_{way}_bytes_per_step"), rel=0.01)


@pytest.mark.parametrize("memory", [32 << 20, 80 << 20])
@pytest.mark.parametrize("overlap", ["forward", "backward", "both"])
def test_updates_under_passes_move_the_same_bytes_and_compute_the_same_bits(
    tmp_path, overlap, memory
):
    (path,) = paths_of(tmp_path, "a")
    # Given rates are not raised to what a busy machine measured.
    common = {"order": "resident", "compute_s": 0.01, "machine": rates_of([path])}
    alone = measure([path], memory=memory, **common)

    under = measure([path], overlap=overlap, memory=memory, **common)

    assert under.state_digest == alone.state_digest
    assert under.read_bytes_per_step == alone.read_bytes_per_step
    assert under.write_bytes_per_step == alone.write_bytes_per_step
    assert under.cache_hit_rate == alone.cache_hit_rate == (memory == 80 << 20)
    assert under.bound_s <= alone.bound_s
    assert alone.parameters_per_s == PARAMETERS / alone.update_s
    assert under.parameters_per_s is None
    assert alone.update_achieved_over_bound is not None
    assert under.update_achieved_over_bound is None


def test_hits_are_those_of_whole_steps_however_far_pending_updates_are(tmp_path):
    roots = paths_of(tmp_path, "a")
    options = UpdateOptions(
        parameters=PARAMETERS,
        paths=roots,
        host_memory_bytes=80 << 20,
        order="resident",
        overlap="forward",
    )
    layout, plan = made_up_layout(PARAMETERS, codec="split"), host_plan(options)
    root = tmp_path / "a" / "store"
    with EngineUpdates(layout, plan, options, roots=[root], machine=rates_of(roots)) as updates:
        hits = []
        for step in (1, 2):
            updates.passes(step, 0.0)
            updates.update(step)
            updates.finish()  # as if they were done before anyone looks
            hits.append(updates.hit_bytes)
        updates.passes(3, 0.0)
        hits.append(updates.hit_bytes)

    assert hits == [0, 0, sum(record.padded_bytes for record in layout.records)]


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_updates_under_backward_begin_when_gradients_appear(tmp_path, overlap, monkeypatch):
    (path,) = paths_of(tmp_path, "a")
    taken = []
    take = EarlyUpdates.take

    def noted(self, updates, **options):
        taken.append(take(self, updates, **options))
        return taken[-1]

    monkeypatch.setattr(EarlyUpdates, "take", noted)

    options = UpdateOptions(
        parameters=PARAMETERS,
        paths=[path],
        host_memory_bytes=40 << 20,
        steps=1,
        order="resident",
        overlap=overlap,
        compute_s=0.01,
        commit_every=2,
    )

    bench_update(options)

    # Of three steps, each updated all of its records but the cached before it was asked to.
    num_records = len(made_up_layout(PARAMETERS, codec="split").records)
    num_streamed = num_records - host_plan(options).num_cached
    assert num_streamed > 1
    assert [len(each) for each in taken] == [num_streamed] * 3


def test_no_update_beats_its_bound_by_a_probe_that_was_too_slow(tmp_path, monkeypatch):
    def slow(directories, **_):
        rates = {"read_bytes_per_s": 1e8, "write_bytes_per_s": 1e8, "mixed_bytes_per_s": 5e7}
        return Machine(
            paths=tuple(PathRates(path=str(d), **rates) for d in directories),
            copy_bytes_per_s=1e10,
            update_parameters_per_s=1e9,
        )

    monkeypatch.setattr("offload.bench.update.probe_machine", slow)

    report = measure(paths_of(tmp_path, "a"))

    assert report.path_rate_factor > 1
    assert report.achieved_over_bound <= 1 + 1e-6


def test_paths_have_the_settings_that_were_measured_as_in_runs(tmp_path, monkeypatch):
    (path,) = paths_of(tmp_path, "a")
    options = UpdateOptions(parameters=10**9, paths=[path], host_memory_bytes=8 << 30)
    measured = PathProfile(
        path=str(path),
        backend="aiofiles",  # which no path has by itself where the C library is
        block_bytes=4 << 20,
        queue_depth=32,
        direct=True,
        read_bytes_per_s=1.0,
        write_bytes_per_s=1.0,
        mixed_bytes_per_s=1.0,
        measured_at="2026-01-02T03:04:05+00:00",
    )
    plain, (engine,) = host_plan(options), engines_of(options)
    (tmp_path / "machine.toml").write_text(MachineProfile(paths=(measured,)).to_toml())

    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "machine.toml"))
    tuned, (tuned_engine,) = host_plan(options), engines_of(options)

    with engine, tuned_engine:
        assert engine.name != tuned_engine.name == "aiofiles"
    assert plain.window_bytes <= 64 << 20
    assert 64 << 20 < tuned.window_bytes <= 2 * 32 * (4 << 20)  # what the queues hold both ways


def test_modulo_shares_by_its_ratio(tmp_path):
    report = measure(paths_of(tmp_path, "a", "b"), striping="modulo:2:1")

    first, second = (moved.write_bytes for moved in report.paths)
    assert first > second > 0


@pytest.mark.parametrize("overlap", ["none", "forward", "both"])
def test_commits_are_timed_and_what_they_write_is_no_steps(tmp_path, overlap):
    options = {"order": "resident", "overlap": overlap, "memory": 80 << 20, "steps": 2}

    report = measure(paths_of(tmp_path, "a"), commit_every=1, **options)

    assert report.commit_s > 0
    assert report.cache_hit_rate == 1  # all is in memory: commits alone write
    assert report.write_bytes_per_step == report.formula_write_bytes_per_step == 0
    assert [path.write_bytes for path in report.paths] == [0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"paths": []}, "at least one `--path`"),
        ({"parameters": 0}, "`--parameters` 0"),
        ({"steps": 0}, "`--steps` 0"),
        ({"compute_s": -1.0}, "`--compute-s` -1.0: expected 0 or more"),
        ({"compute_s": float("nan")}, "`--compute-s` nan"),
        ({"compute_s": float("inf")}, "`--compute-s` inf"),
        ({"commit_every": -1}, "`--commit-every` -1"),
        ({"codec": "lossy"}, "`--codec` lossy"),
        ({"striping": "fastest"}, "policy.striping"),
        (
            {"striping": "modulo:2:1"},
            "modulo:2:1`: expected one number for each path.* is 1, found 2",
        ),
        ({"order": "random"}, "policy.order"),
        ({"baseline": "faster"}, "`--baseline` faster"),
        ({"baseline": "mlp-like", "paths": [Path("/"), Path(), Path("..")]}, "one or two `--path"),
        ({"baseline": "mlp-like", "paths": [Path(), Path()]}, "expected each `--path` once"),
        ({"baseline": "mlp-like", "commit_every": 1}, "cannot commit"),
        ({"overlap": "sideways"}, "policy.overlap"),
        ({"overlap": "both"}, "`--order` resident.*found `sequential`"),
        ({"overlap": "forward"}, "`--order` resident.*found `sequential`"),
        ({"overlap": "forward", "order": "resident", "baseline": "mlp-like"}, "no baseline"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, text):
    defaults = {"parameters": 10, "paths": [tmp_path], "host_memory_bytes": 1 << 20}

    with pytest.raises(ConfigError, match=text):
        bench_update(UpdateOptions(**(defaults | options)))


def test_what_a_baseline_does_not_follow_is_said(tmp_path, caplog):
    (path,) = paths_of(tmp_path, "a")

    measure([path], baseline="mlp-like", order="sequential", striping="adaptive")
    measure([path], baseline="mlp-like", order="alternating")
    assert caplog.messages == []
    measure([path], baseline="mlp-like", order="resident", striping="single")

    assert [message.partition(" has no")[0] for message in caplog.messages] == [
        "`--order` resident",
        "`--striping` single",
    ]
    assert "which has its own: alternating" in caplog.messages[0]


@pytest.mark.parametrize("found", ["1.5", "nan", "many"])
def test_parameters_are_a_whole_number(tmp_path, capsys, found):
    code = run(["bench", "update", "--parameters", found, "--path", str(tmp_path),
                "--host-memory", "1MiB"])  # fmt: skip

    assert code == 2
    assert f"expected a whole number such as `4e6`, found `{found}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "text"), [(64 << 20, "of `--host-memory`"), (1 << 70, "state on storage, found")]
)
def test_what_can_have_no_room_is_refused_before_it_is_laid_out(
    tmp_path, monkeypatch, memory, text
):
    laid_out = []

    def layout(num_parameters, *, codec):
        laid_out.append(num_parameters)
        return made_up_layout(num_parameters, codec=codec)

    monkeypatch.setattr("offload.bench.update_room.made_up_layout", layout)

    with pytest.raises(PlanError, match=text):
        bench_update(UpdateOptions(parameters=10**15, paths=[tmp_path], host_memory_bytes=memory))

    assert max(laid_out) <= PARAMETER_ELEMENTS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("parameters", [5, PARAMETER_ELEMENTS, 3 * PARAMETER_ELEMENTS + 5])
@pytest.mark.parametrize("codec", ["split", "fp32"])
def test_the_least_need_is_that_of_the_whole_layout(tmp_path, parameters, codec):
    options = UpdateOptions(
        parameters=parameters, paths=[tmp_path], host_memory_bytes=0, codec=codec
    )

    need = least_need(options)

    assert need.memory_bytes == host_plan(options).smallest_bytes
    assert need.storage_bytes == made_up_layout(parameters, codec=codec).state_bytes


def test_too_little_memory_is_refused_with_the_smallest(tmp_path):
    with pytest.raises(PlanError, match="expected at least"):
        bench_update(
            UpdateOptions(parameters=PARAMETERS, paths=[tmp_path], host_memory_bytes=1 << 20)
        )
