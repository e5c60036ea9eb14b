"""Runs with checkpoints: kept, copied elsewhere, and gone on from."""

import pytest

from offload.errors import ConfigError
from offload.runs.inspection import verify_store
from offload.storage.drain import drained_copies


def test_checkpoints_are_saved_kept_and_copied_and_change_no_bit(tmp_path, small_config, train):
    plain = train(small_config(train__steps=6), run_dir=tmp_path / "plain")

    saved = train(
        small_config(
            train__steps=6,
            checkpoint__save_every=2,
            checkpoint__keep_last=2,
            checkpoint__drain=str(tmp_path / "backup"),
        ),
        run_dir=tmp_path / "run",
    )

    store = tmp_path / "run" / "store"
    assert saved.state_digest == plain.state_digest
    assert saved.losses == plain.losses
    assert saved.read_bytes_per_step == plain.read_bytes_per_step
    assert saved.write_bytes_per_step == plain.write_bytes_per_step
    assert sorted(path.name for path in store.glob("checkpoint-*")) == [
        "checkpoint-step-000004",
        "checkpoint-step-000006",
    ]
    copies = drained_copies(tmp_path / "backup")
    assert [copy.step for copy in copies] == [4, 6]
    assert all(verify_store(copy.root).ok for copy in copies)


def test_a_run_goes_on_from_a_copy_in_a_new_directory(tmp_path, small_config, train):
    plain = train(small_config(train__steps=6), run_dir=tmp_path / "plain")
    train(
        small_config(
            train__steps=4, checkpoint__save_every=2, checkpoint__drain=str(tmp_path / "backup")
        ),
        run_dir=tmp_path / "run",
    )
    copy = drained_copies(tmp_path / "backup")[0]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    last = train(
        small_config(
            train__steps=6, tiers__storage__paths=[str(tmp_path / "a"), str(tmp_path / "b")]
        ),
        run_dir=tmp_path / "new",
        resume=copy.root,
    )

    assert last.first_step == 3
    assert last.losses == plain.losses[2:]
    assert last.state_digest == plain.state_digest
    assert verify_store(copy.root).ok


def test_what_a_failure_costs_and_what_wears_is_reported(tmp_path, small_config, train):
    result = train(
        small_config(
            train__steps=5,
            tiers__storage__commit_every=2,
            tiers__storage__endurance="1TB",
            checkpoint__mean_time_between_failures="1h",
        ),
        run_dir=tmp_path / "run",
    )

    assert result.commit_s > 0 and result.recovery_s > 0
    assert result.expected_lost_work_s == pytest.approx(
        result.commit_s + result.step_s + result.recovery_s
    )
    assert result.best_commit_interval_s > 0 and result.best_commit_every >= 1
    assert result.drive_days == pytest.approx(10**12 / result.written_bytes_per_day)


def test_commits_by_time_are_due_at_the_end_of_a_step(tmp_path, small_config, train):
    result = train(
        small_config(train__steps=3, tiers__storage__commit_every="0.001s"),
        run_dir=tmp_path / "run",
    )

    manifests = sorted(path.name for path in (tmp_path / "run" / "store").glob("manifest-*"))
    assert manifests[-1] == "manifest-0000000003"
    assert result.commit_s > 0


def test_a_copy_does_not_replace_a_run_that_is_there(tmp_path, small_config, train):
    options = {"checkpoint__save_every": 1, "checkpoint__drain": str(tmp_path / "backup")}
    train(small_config(train__steps=1, **options), run_dir=tmp_path / "run")
    (copy,) = drained_copies(tmp_path / "backup")

    with pytest.raises(ConfigError, match="new or empty directory"):
        train(small_config(train__steps=2), run_dir=tmp_path / "run", resume=copy.root)
