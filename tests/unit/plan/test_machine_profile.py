"""`machine.toml`: what is written is read again, and anything else is refused."""

from dataclasses import replace

import pytest

from offload.errors import ConfigError
from offload.plan.machine import PathRates
from offload.plan.machine_profile import (
    MachineProfile,
    PathProfile,
    default_file,
    parse_profile,
    read_profile,
)

NVME = PathProfile(
    path='/mnt/nvme "0"',
    backend="io_uring",
    block_bytes=1 << 20,
    queue_depth=16,
    direct=True,
    read_bytes_per_s=2.5e9,
    write_bytes_per_s=2e9,
    mixed_bytes_per_s=1.1e9,
    measured_at="2026-01-02T03:04:05+00:00",
)


def test_what_is_written_is_read_again():
    profile = MachineProfile(paths=(NVME,))

    assert parse_profile(profile.to_toml(), source="x") == profile


def test_a_directory_belongs_to_the_nearest_path_above():
    deeper = PathProfile(**(_values(NVME) | {"path": '/mnt/nvme "0"/a'}))
    profile = MachineProfile(paths=(NVME, deeper))

    assert profile.find('/mnt/nvme "0"/a/store') == deeper
    assert profile.find('/mnt/nvme "0"/b') == NVME
    assert profile.find("/mnt") is None


def test_new_measurements_replace_those_of_the_same_path():
    newer = PathProfile(**(_values(NVME) | {"queue_depth": 4}))
    other = PathProfile(**(_values(NVME) | {"path": "/other"}))

    merged = MachineProfile(paths=(NVME, other)).merged(MachineProfile(paths=(newer,)))

    assert merged.paths == (newer, other)


@pytest.mark.parametrize(
    "text",
    [
        "not toml at all =",
        "schema = 2\n",
        "paths = []\n",
        'schema = 1\n[[paths]]\npath = "/a"\n',
        MachineProfile(paths=(NVME,)).to_toml() + "colour = 1\n",
        MachineProfile(paths=(NVME,)).to_toml().replace("= 16", '= "16"'),
        MachineProfile(paths=(NVME,)).to_toml().replace("= 16", "= 0"),
        MachineProfile(paths=(NVME,)).to_toml().replace("= 2500000000.0", "= nan"),
        MachineProfile(paths=(NVME,)).to_toml().replace("= 2500000000.0", "= inf"),
        MachineProfile(paths=(NVME,)).to_toml().replace("= 2500000000.0", "= -1.0"),
        MachineProfile(paths=(NVME,)).to_toml().replace("= 2500000000.0", "= 1e-300"),
        MachineProfile(paths=(NVME,)).to_toml().replace("= 2500000000.0", "= 1e300"),
        MachineProfile(paths=(NVME,)).to_toml() + "[[drives]]\npath = '/a'\n",
        "schema = 1\npaths = 3\n",
        MachineProfile(paths=(replace(NVME, block_bytes=65537),)).to_toml(),
        MachineProfile(paths=(replace(NVME, block_bytes=512),)).to_toml(),
    ],
)
def test_another_text_is_refused_with_its_source(text):
    with pytest.raises(ConfigError, match=r"machine\.toml"):
        parse_profile(text, source="some/machine.toml")


def test_the_default_file_may_be_missing_and_a_named_one_may_not(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "none.toml"))

    assert read_profile() == MachineProfile()
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_profile(tmp_path / "none.toml")


def test_the_default_file_lies_in_the_users_configuration(tmp_path, monkeypatch):
    monkeypatch.delenv("OFFLOAD_MACHINE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = default_file()
    monkeypatch.setenv("OFFLOAD_MACHINE", "")

    assert found == tmp_path / "offload" / "machine.toml"
    assert default_file() is None


@pytest.mark.parametrize("kind", ["profile", "rates"])
def test_a_path_is_held_to_its_limit_both_ways_together(kind):
    rates = {"read_bytes_per_s": 2.5e9, "write_bytes_per_s": 2e9, "mixed_bytes_per_s": 1.1e9}
    path = NVME if kind == "profile" else PathRates(path="/a", **rates)

    held = path.held_to(10**9)

    assert (held.read_bytes_per_s, held.write_bytes_per_s) == (1e9, 1e9)
    assert held.mixed_bytes_per_s == 0.5e9
    assert path.held_to(None) == path == path.held_to(10**10)


def _values(profile):
    return {name: getattr(profile, name) for name in PathProfile.__dataclass_fields__}
