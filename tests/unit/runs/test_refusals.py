"""What a run refuses before it writes anything."""

import argparse
import shutil
from pathlib import Path

import pytest
import torch

import offload
from offload.config import load_config
from offload.errors import ConfigError, PlanError, StoreError
from offload.plan.usable_memory import UsableMemory
from offload.runs.planning import plan_run
from offload.runs.prediction import plan_and_predict
from offload.runs.train import run_training
from offload.storage.ownership import Ownership

SMALL = Path(__file__).parents[3] / "examples" / "small.toml"


def config(*overrides):
    source = ("data.source=files", f'data.files=["{argparse.__file__}"]')
    return load_config(SMALL, [*source, *overrides])


def assert_refused(tmp_path, error, match, *overrides):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=match):
        run_training(config(*overrides), run_dir=tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_budget_below_the_smallest_names_it_and_the_smallest_fits(tmp_path):
    smallest = plan_run(config()).to_json()["smallest"]["host_memory"]

    assert_refused(tmp_path, PlanError, str(smallest), f"tiers.host.memory={smallest - 1}")
    assert plan_run(config(f"tiers.host.memory={smallest}")).fits


def test_a_run_that_another_process_has_open_stays_as_it_is(tmp_path):
    store = tmp_path / "run" / "store"
    store.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("of the other\n")
    owner = Ownership(store)
    owner.acquire()

    with pytest.raises(StoreError, match="cannot own store .* found another store") as raised:
        run_training(config(), run_dir=tmp_path / "run", resume="auto")
    owner.release()

    assert raised.value.is_refusal
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["metrics.jsonl", "store"]


def test_a_run_that_another_begins_while_it_is_planned_stays_as_it_is(tmp_path, monkeypatch):
    store = tmp_path / "run" / "store"
    owner = Ownership(store)

    def begin(_):
        store.mkdir(parents=True)
        owner.acquire()

    monkeypatch.setattr("offload.runs.train.warm_up", begin)

    with pytest.raises(StoreError, match="cannot own store"):
        run_training(config(), run_dir=tmp_path / "run", resume="auto")
    owner.release()

    assert [path.name for path in (tmp_path / "run").iterdir()] == ["store"]


def test_a_device_that_is_not_here_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert_refused(tmp_path, ConfigError, "device `cuda`", "tiers.device.kind=cuda")


def test_a_device_that_is_not_here_is_planned_for_without_times(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    profile = tmp_path / "machine.toml"
    profile.write_text("schema = 1\n")

    plan = plan_and_predict(config("tiers.device.kind=cuda"), machine_file=profile)

    assert plan.fits
    assert plan.prediction.step is None
    assert "device `cuda`" in plan.warnings[-1]


def test_a_run_to_go_on_with_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"`\S*absent`: expected the directory.*check the path"):
        run_training(config(), resume=str(tmp_path / "absent"))


def test_a_missing_storage_path_is_named(tmp_path):
    path = tmp_path / "absent"

    assert_refused(tmp_path, ConfigError, str(path), f'tiers.storage.paths=["{path}"]')


def test_a_file_as_storage_path_is_named(tmp_path):
    path = tmp_path / "file"
    path.touch()

    assert_refused(tmp_path, ConfigError, str(path), f'tiers.storage.paths=["{path}"]')


def test_a_directory_named_twice_is_refused(tmp_path):
    drive, link = tmp_path / "drive", tmp_path / "link"
    drive.mkdir()
    link.symlink_to(drive)
    twice = f"tiers.storage.paths=['{drive}', '{link}']"

    assert_refused(tmp_path, ConfigError, r"each directory once, found 2 .*leave one out", twice)
    with pytest.raises(ConfigError, match="each directory once"):
        plan_run(config(twice))


@pytest.mark.parametrize("ratio", ["modulo:2:1", "modulo:3:2:1"])
def test_a_ratio_for_other_paths_than_there_are_is_refused(tmp_path, ratio):
    found = f"is 1, found {ratio.count(':')}; change `policy.striping`"

    assert_refused(tmp_path, ConfigError, found, f"policy.striping={ratio}")
    with pytest.raises(ConfigError, match=found):
        plan_run(config(f"policy.striping={ratio}"))
    session = offload.Session(
        host_memory="16MiB", store=tmp_path / "store", policy={"striping": ratio}
    )
    with pytest.raises(ConfigError, match=found), session:
        pass
    plan_run(config(f"policy.striping={ratio}", "offload=false"))  # where it has no effect


def test_a_path_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    # Root may write anywhere: what the system would answer others is given here.
    monkeypatch.setattr("offload.runs.planned_storage.os.access", lambda *_: False)

    assert_refused(tmp_path, ConfigError, str(tmp_path))


def test_too_little_free_space_is_refused_with_both_figures(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(total=10**7, free=10**6)
    monkeypatch.setattr("offload.runs.planned_storage.shutil.disk_usage", lambda _: usage)

    assert_refused(tmp_path, PlanError, r"found 900000 bytes")


def test_a_capacity_below_the_need_is_refused(tmp_path):
    assert_refused(tmp_path, PlanError, r"tiers\.storage\.capacity", "tiers.storage.capacity=1MiB")


def test_data_that_is_missing_or_too_short_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 100)

    assert_refused(tmp_path, ConfigError, "absent", 'data.files=["/absent"]')
    assert_refused(tmp_path, ConfigError, "at least 65 bytes", f'data.files=["{short}"]')


def test_a_factory_that_cannot_be_found_is_named(tmp_path):
    assert_refused(
        tmp_path,
        ConfigError,
        "absent_module:make",
        "model.kind=factory",
        "model.factory=absent_module:make",
    )


def test_memory_for_activations_is_among_what_can_be_given_up():
    plan = plan_run(config("tiers.host.memory=8MiB", "activations.offload=storage")).to_json()

    (saving,) = plan["give_up"]
    assert saving["change"] == 'activations.offload = "none"'
    assert saving["smallest_bytes"] <= 8 << 20
    assert plan["give_up_note"] is None


def test_where_nothing_helps_a_plan_and_an_error_say_so(tmp_path):
    plan = plan_run(config("tiers.host.memory=64KiB"))
    helped = plan_run(config("tiers.host.memory=64KiB", "policy.parameters=host"))

    assert plan.to_json()["give_up"] == []
    assert "no other choice" in plan.to_json()["give_up_note"]
    assert helped.to_json()["give_up_note"] is None
    assert_refused(
        tmp_path,
        PlanError,
        '`policy.parameters = "storage"` needs',
        "tiers.host.memory=64KiB",
        "policy.parameters=host",
    )


def applied(saving):
    """Returns the overrides that a saving names, with as much of its tier as it says."""
    budget = {"host": "tiers.host.memory", "storage": "tiers.storage.capacity"}[saving["tier"]]
    changes = [change.replace(" = ", "=") for change in saving["change"].split(", ")]
    return (*changes, f"{budget}={saving['smallest_bytes']}")


def test_changes_that_are_enough_only_together_are_named_together():
    in_memory = ("policy.parameters=host", "policy.optimizer=host", "train.gradient_dtype=float32")
    least = plan_run(config("tiers.host.memory=1GiB")).to_json()["smallest"]

    plan = plan_run(config(f"tiers.host.memory={least['host_memory']}", *in_memory)).to_json()

    *singles, together = plan["give_up"]
    assert min(saving["smallest_bytes"] for saving in singles) > least["host_memory"]
    assert together["smallest_bytes"] <= least["host_memory"]
    assert {change.partition(" = ")[0] for change in together["change"].split(", ")} == {
        "policy.parameters",
        "policy.optimizer",
        "train.gradient_dtype",
    }
    for saving in plan["give_up"]:
        assert plan_run(config(*in_memory, *applied(saving))).fits


HALF = """
from torch import nn

class Half(nn.Module):
    def __init__(self, **_):
        super().__init__()
        self.layer = nn.Linear(1024, 1024).half()

    def forward(self, inputs, targets):
        return self.layer.weight.float().sum() + (inputs + targets).float().sum()
"""


def test_a_saving_that_the_model_refuses_is_none(tmp_path, monkeypatch):
    (tmp_path / "half_model.py").write_text(HALF)
    monkeypatch.syspath_prepend(tmp_path)
    half = ("model.kind=factory", "model.factory=half_model:Half", "optimizer.codec=fp32")

    plan = plan_run(config("tiers.storage.capacity=8MiB", *half)).to_json()

    assert not plan["fits"]
    assert [each["change"] for each in plan["give_up"]] == ['tiers.storage.durability = "none"']


def test_where_storage_alone_is_short_a_plan_says_what_takes_less_of_it():
    short = "tiers.storage.capacity=20MiB"
    kept = ("checkpoint.save_every=2", "checkpoint.keep_last=2", "train.max_grad_norm=0")

    once = plan_run(config(short)).to_json()
    often = plan_run(config(short, *kept, "policy.overlap=both", "optimizer.codec=fp32")).to_json()

    uncommitted = 'tiers.storage.durability = "none"'
    together = 'policy.overlap = "none", optimizer.codec = "split", checkpoint.save_every = 0'
    assert [saving["change"] for saving in once["give_up"]] == [uncommitted]
    assert [saving["change"] for saving in often["give_up"]] == [
        'policy.overlap = "none"',
        'optimizer.codec = "split"',
        "checkpoint.save_every = 0",
        f"{uncommitted}, checkpoint.save_every = 0",
        f"{together}, {uncommitted}",
    ]
    for plan in (once, often):
        assert plan["give_up_note"] is None
        for saving in plan["give_up"]:
            assert saving["tier"] == "storage"
            assert saving["smallest_bytes"] < plan["smallest"]["storage"]
    (saving,) = once["give_up"]
    enough = (uncommitted, f"tiers.storage.capacity={saving['smallest_bytes']}")
    assert plan_run(config(*enough)).fits


def test_where_nothing_takes_less_storage_or_device_memory_a_plan_says_so():
    least = plan_run(
        config("tiers.storage.capacity=20MiB", 'tiers.storage.durability="none"')
    ).to_json()
    device = ("tiers.device.kind=emulated", "tiers.device.memory=64KiB")
    streamed = plan_run(config(*device)).to_json()
    placed = plan_run(config(*device, "policy.parameters=device")).to_json()

    assert least["give_up"] == streamed["give_up"] == []
    assert "`tiers.storage.capacity`" in least["reasons"][0]
    assert "needs less of storage" in least["give_up_note"]
    assert "needs less of `tiers.device.memory`" in streamed["give_up_note"]
    assert [each["change"] for each in placed["give_up"]] == ['policy.parameters = "host"']


def test_a_batch_that_no_memory_holds_is_refused_with_what_to_lower(tmp_path):
    assert_refused(
        tmp_path,
        PlanError,
        r"`train.batch` 16777216 and `model.context` 4096, .*allocate memory.*lower",
        "train.batch=16777216",
        "model.context=4096",
    )


def test_a_window_larger_than_the_budget_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"`window` must be a part of `memory`.*found 1 TiB"):
        config("tiers.host.window=1TiB")


def test_a_window_too_small_for_a_record_holds_one_and_says_so(tmp_path):
    plan = plan_run(config("tiers.host.window=1"))
    record_bytes = plan.host.buffer_bytes

    assert plan.host.num_buffers == 1
    assert any("`tiers.host.window` of 1 B is too small" in each for each in plan.warnings)
    enough = plan_run(config(f"tiers.host.window={record_bytes}"))
    assert not any("tiers.host.window" in each for each in enough.warnings)


def test_a_budget_too_small_for_the_records_of_a_store_says_what_a_new_run_needs(tmp_path):
    large = plan_run(config("tiers.host.memory=256MiB"))
    smallest = plan_run(config("tiers.host.memory=1MiB")).host.smallest_bytes

    resumed = plan_run(config(f"tiers.host.memory={smallest}"), stored=large.layout)

    assert not resumed.fits
    assert resumed.smallest_anew_bytes == smallest
    with pytest.raises(PlanError, match=r"the store keeps the layout .* a run that begins anew"):
        resumed.require_fit()


def test_a_plan_that_takes_more_memory_than_there_is_is_refused(tmp_path, monkeypatch):
    usable = UsableMemory(machine_bytes=3 << 20)
    monkeypatch.setattr("offload.runs.planning.usable_memory", lambda: usable)

    for change in ('tiers.host.memory="8MiB"', "offload=false"):
        assert_refused(tmp_path, PlanError, "more memory than there is.* 3 MiB of this", change)
        assert plan_run(config(change)).to_json()["fits"] is False


@pytest.mark.parametrize("is_offloaded", ["true", "false"])
def test_an_emulated_device_takes_of_this_machines_memory(tmp_path, monkeypatch, is_offloaded):
    options = ("tiers.device.kind=emulated", f"offload={is_offloaded}", 'tiers.host.memory="8MiB"')
    plan = plan_run(config(*options))
    needed = plan.held_bytes
    for there_are, fits in ((needed, True), (needed - 1, False)):
        usable = UsableMemory(machine_bytes=there_are)
        monkeypatch.setattr("offload.runs.planning.usable_memory", lambda usable=usable: usable)

        assert plan_run(config(*options)).fits is fits

    assert plan.device_memory_bytes > 0
    assert_refused(tmp_path, PlanError, "the emulated device, .* its own", *options)


def test_a_drain_that_cannot_be_written_is_refused(tmp_path):
    assert_refused(
        tmp_path, ConfigError, "cannot copy checkpoints to", "checkpoint.drain=/proc/1/x"
    )
    file = tmp_path / "file"
    file.touch()
    assert_refused(tmp_path, ConfigError, "or a file; choose", f"checkpoint.drain={file}/x")


def test_a_budget_of_more_memory_than_there_is_is_warned_of(tmp_path, caplog):
    plan = plan_run(config('tiers.host.memory="900TiB"'))

    assert plan.fits
    [warning] = [each for each in plan.warnings if "tiers.host.memory" in each]
    assert "900 TiB is more than the" in warning
    assert not any("tiers.host.memory" in each for each in plan_run(config()).warnings)


def test_a_session_refuses_a_model_that_takes_more_memory_than_there_is(tmp_path, monkeypatch):
    usable = UsableMemory(machine_bytes=3 << 20)
    monkeypatch.setattr("offload.streaming.arrangement.usable_memory", lambda: usable)
    model = torch.nn.ModuleList([torch.nn.Linear(512, 512) for _ in range(8)])

    with (
        offload.Session(host_memory="16MiB", store=tmp_path / "store") as session,
        pytest.raises(PlanError, match="more memory than there is"),
    ):
        session.wrap(model)


def test_a_session_counts_an_emulated_device_as_this_machines_memory(tmp_path, monkeypatch):
    usable = UsableMemory(machine_bytes=20 << 20)
    monkeypatch.setattr("offload.streaming.arrangement.usable_memory", lambda: usable)
    model = torch.nn.ModuleList([torch.nn.Linear(512, 512) for _ in range(8)])

    def wrap(device_memory, name):
        options = {"device": "emulated", "device_memory": device_memory}
        with offload.Session(host_memory="16MiB", store=tmp_path / name, **options) as session:
            session.wrap(model)

    with pytest.raises(PlanError, match="the emulated device, 7.03 MiB its own; lower"):
        wrap("8MiB", "refused")
    wrap("3MiB", "fits")
