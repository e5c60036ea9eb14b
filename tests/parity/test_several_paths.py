"""Runs over several paths, under each striping, are the run on one path, bit for bit."""

import pytest

from offload.plan.machine_profile import MachineProfile, PathProfile
from offload.runs.inspection import inspect_store

pytestmark = pytest.mark.slow  # seconds in all; `make test` has others of their kind


def dirs(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
    return tuple(str(tmp_path / name) for name in names)


@pytest.mark.parametrize("striping", ["adaptive", "proportional", "modulo", "modulo:2:1", "single"])
def test_every_striping_gives_the_bits_of_one_path(tmp_path, small_config, train, striping):
    plain = train(small_config(train__steps=4), run_dir=tmp_path / "plain")

    striped = train(
        small_config(
            train__steps=4,
            tiers__storage__paths=list(dirs(tmp_path, "a", "b")),
            policy__striping=striping,
        ),
        run_dir=tmp_path / "striped",
    )

    assert striped.losses == plain.losses
    assert striped.state_digest == plain.state_digest
    assert striped.read_bytes_per_step == plain.read_bytes_per_step
    assert striped.write_bytes_per_step == plain.write_bytes_per_step


def test_a_run_goes_on_over_other_paths(tmp_path, small_config, train):
    plain = train(small_config(train__steps=6), run_dir=tmp_path / "plain")
    a, b, c = dirs(tmp_path, "a", "b", "c")

    for steps, paths in ((2, [a, b]), (4, [a, b, c]), (6, [b, c])):
        last = train(
            small_config(train__steps=steps, tiers__storage__paths=paths),
            run_dir=tmp_path / "run",
            resume="auto",
        )

    assert last.first_step == 5
    assert last.state_digest == plain.state_digest


def test_a_rate_limit_changes_no_bit(tmp_path, small_config, train):
    plain = train(small_config(train__steps=2), run_dir=tmp_path / "plain")

    limited = train(
        small_config(
            train__steps=2,
            tiers__storage__paths=list(dirs(tmp_path, "a", "b")),
            tiers__storage__rate_limit=["none", "200MB"],
        ),
        run_dir=tmp_path / "limited",
    )

    assert limited.state_digest == plain.state_digest


def test_proportional_striping_goes_by_the_profile_of_the_machine(
    tmp_path, small_config, train, monkeypatch
):
    paths = dirs(tmp_path, "a", "b")
    profile = MachineProfile(
        paths=tuple(
            PathProfile(
                path=path, backend="threads", block_bytes=1 << 20, queue_depth=4, direct=False,
                read_bytes_per_s=rate, write_bytes_per_s=rate, mixed_bytes_per_s=rate,
                measured_at="2026-01-02",
            )
            for path, rate in zip(paths, (3e8, 1e8), strict=True)
        )
    )  # fmt: skip
    (tmp_path / "machine.toml").write_text(profile.to_toml())
    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "machine.toml"))

    run = train(
        small_config(
            train__steps=2, tiers__storage__paths=list(paths), policy__striping="proportional"
        ),
        run_dir=tmp_path / "run",
    )

    first, second = inspect_store(tmp_path / "run").bytes_by_path.values()
    assert first / (first + second) == pytest.approx(0.75, abs=0.1)  # of 22 blocks
    assert run.store.startswith(paths[0])
