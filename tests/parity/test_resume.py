import json
import shutil

import pytest
from parity.sessions import use_small_records

from offload.errors import ConfigError

pytestmark = pytest.mark.slow  # seconds in all; `make test` has others of their kind


def steps_of(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_run_in_two_parts_ends_as_one_in_one_part(tmp_path, small_config, train):
    whole = train(small_config(train__steps=6), run_dir=tmp_path / "whole")

    first = train(small_config(train__steps=3), run_dir=tmp_path / "parts")
    second = train(small_config(train__steps=6), run_dir=tmp_path / "parts", resume="auto")

    assert first.losses + second.losses == whole.losses
    assert second.state_digest == whole.state_digest
    assert (second.first_step, second.steps) == (4, 6)
    assert second.validation_loss_before == first.validation_loss_after
    assert steps_of(tmp_path / "parts") == [1, 2, 3, 4, 5, 6]


def test_resuming_a_finished_run_does_nothing_and_gives_its_digest(tmp_path, small_config, train):
    done = train(small_config(train__steps=2), run_dir=tmp_path / "run")

    again = train(small_config(train__steps=2), run_dir=tmp_path / "run", resume="auto")

    assert again.state_digest == done.state_digest
    assert (again.losses, again.step_s) == ([], None)


@pytest.mark.parametrize("leftover", ["new directory", "aborted start"])
def test_auto_starts_from_the_beginning_where_no_commit_is(tmp_path, small_config, train, leftover):
    run_dir = tmp_path / "run"
    if leftover == "aborted start":
        train(small_config(train__steps=1), run_dir=run_dir)
        for manifest in (run_dir / "store").glob("manifest-*"):
            manifest.unlink()

    result = train(small_config(train__steps=2), run_dir=run_dir, resume="auto")

    assert result.first_step == 1
    assert steps_of(run_dir) == [1, 2]


@pytest.mark.parametrize("resume", ["run directory", "store"])
def test_a_path_resumes_the_run_in_it(tmp_path, small_config, train, resume):
    train(small_config(train__steps=1), run_dir=tmp_path / "run")

    path = tmp_path / "run" / ("store" if resume == "store" else "")
    result = train(small_config(train__steps=2), resume=path)

    assert result.first_step == 2


def test_a_path_without_a_commit_is_refused_and_left_alone(tmp_path, small_config, train):
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="complete commit"):
        train(small_config(), resume=tmp_path / "run")

    assert not list((tmp_path / "run").iterdir())


def test_a_used_directory_needs_resume(tmp_path, small_config, train):
    train(small_config(train__steps=1), run_dir=tmp_path / "run")

    with pytest.raises(ConfigError, match="--resume"):
        train(small_config(train__steps=2), run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    "key, value",
    [
        ("optimizer.lr", 5e-4),
        ("model.layers", 3),
        ("data.validation_fraction", 0.1),
        ("train.seed", 1),
    ],
)
def test_a_change_of_what_the_state_depends_on_is_refused(
    tmp_path, small_config, train, key, value
):
    train(small_config(train__steps=1), run_dir=tmp_path / "run")
    before = (tmp_path / "run" / "config.toml").read_text()

    with pytest.raises(ConfigError, match=f"`{key}`"):
        train(
            small_config(train__steps=2, **{key.replace(".", "__"): value}),
            run_dir=tmp_path / "run",
            resume="auto",
        )

    assert (tmp_path / "run" / "config.toml").read_text() == before


def test_placement_may_change_on_resume(tmp_path, small_config, train):
    whole = train(small_config(train__steps=4), run_dir=tmp_path / "whole")

    train(small_config(train__steps=2), run_dir=tmp_path / "parts")
    changed = small_config(train__steps=4, policy__optimizer="host", policy__parameters="host")
    second = train(changed, run_dir=tmp_path / "parts", resume="auto")

    assert second.state_digest == whole.state_digest


def test_a_store_keeps_the_records_that_it_was_laid_out_with(
    tmp_path, small_config, train, monkeypatch
):
    whole = train(small_config(train__steps=4), run_dir=tmp_path / "whole")
    with monkeypatch.context() as patch:
        use_small_records(patch)
        train(small_config(train__steps=2), run_dir=tmp_path / "parts")
    first = _plan_in(tmp_path / "parts")

    # A budget for which a new store would have other records.
    second = train(small_config(train__steps=4), run_dir=tmp_path / "parts", resume="auto")

    cut = [each["tiers"]["host"]["cut"] for each in (first, _plan_in(tmp_path / "parts"))]
    assert cut[0]["state_buffer_bytes"] == cut[1]["state_buffer_bytes"]
    assert (
        cut[0]["state_buffer_bytes"]
        < _plan_in(tmp_path / "whole")["tiers"]["host"]["cut"]["state_buffer_bytes"]
    )
    assert second.state_digest == whole.state_digest


def test_a_run_directory_that_was_moved_takes_its_store_along(tmp_path, small_config, train):
    first = train(small_config(train__steps=1), run_dir=tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")

    again = train(small_config(train__steps=1), resume=tmp_path / "moved")

    assert again.state_digest == first.state_digest


def test_runs_on_one_path_keep_their_stores_apart(tmp_path, small_config, train):
    (tmp_path / "drive").mkdir()
    config = small_config(train__steps=1, tiers__storage__paths=f'["{tmp_path / "drive"}"]')

    results = [train(config, run_dir=tmp_path / name) for name in ("a", "b")]

    assert results[0].store != results[1].store
    assert len(list((tmp_path / "drive").iterdir())) == 2


def test_fewer_steps_than_are_done_are_refused_and_leave_the_files(tmp_path, small_config, train):
    train(small_config(train__steps=2), run_dir=tmp_path / "run")
    files = [tmp_path / "run" / name for name in ("config.toml", "plan.json", "result.json")]
    before = [file.read_bytes() for file in files]

    with pytest.raises(ConfigError, match=r"nothing to do.*2 steps are done.*found 1"):
        train(small_config(train__steps=1), run_dir=tmp_path / "run", resume="auto")
    assert [file.read_bytes() for file in files] == before

    train(small_config(train__steps=2), run_dir=tmp_path / "run", resume="auto")
    assert files[2].read_bytes() == before[2]


def _plan_in(run_dir):
    return json.loads((run_dir / "plan.json").read_text())
