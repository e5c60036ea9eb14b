"""The file of a machine's profile: replaced as a whole, or left alone with a clear error."""

import pytest

from offload.errors import ConfigError
from offload.plan.machine_profile import MachineProfile, MemoryProfile, parse_profile
from offload.runs.profile_file import add_to_profile, require_writable

MEASURED = MachineProfile(
    memory=(MemoryProfile(threads=1, copy_bytes_per_s=1e10, measured_at="2026-01-01T00:00:00"),)
)


def test_what_is_measured_is_added_and_nothing_else_is_left(tmp_path):
    file = tmp_path / "new" / "machine.toml"

    require_writable(file)
    assert not file.exists()
    add_to_profile(file, MEASURED)

    assert parse_profile(file.read_text(), source="x") == MEASURED
    assert [each.name for each in file.parent.iterdir()] == ["machine.toml"]


@pytest.mark.parametrize("act", [require_writable, lambda file: add_to_profile(file, MEASURED)])
def test_a_file_that_cannot_be_written_is_named(tmp_path, act):
    (tmp_path / "no-directory").write_text("")

    with pytest.raises(ConfigError, match=r"no-directory/machine.toml.*OFFLOAD_MACHINE"):
        act(tmp_path / "no-directory" / "machine.toml")
