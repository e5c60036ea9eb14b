"""The engine takes the settings that were measured for a path."""

from dataclasses import replace
from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.plan.machine_profile import MachineProfile, PathProfile
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings, nominal_rates


def profile(path, backend="aiofiles", mixed_bytes_per_s=1.0):
    return MachineProfile(
        paths=(
            PathProfile(
                path=str(path),
                backend=backend,
                block_bytes=65536,
                queue_depth=3,
                direct=True,
                read_bytes_per_s=1.0,
                write_bytes_per_s=1.0,
                mixed_bytes_per_s=mixed_bytes_per_s,
                measured_at="2026-01-02T03:04:05+00:00",
            ),
        )
    )


def test_a_directory_below_a_measured_path_has_its_settings(tmp_path):
    (settings,) = measured_settings(tmp_path / "run" / "store", profile=profile(tmp_path))

    assert settings.root == tmp_path / "run" / "store"
    assert (settings.backend, settings.queue_depth, settings.block_bytes) == ("aiofiles", 3, 65536)
    with Engine(paths=[settings]) as engine:
        assert engine.name == "aiofiles"


def test_nothing_is_known_of_other_directories(tmp_path):
    assert measured_settings(Path("/elsewhere"), profile=profile(tmp_path)) == ()
    assert measured_settings(tmp_path) == ()


def test_a_backend_that_is_gone_is_replaced_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OFFLOAD_PURE", "1")

    (settings,) = measured_settings(tmp_path, profile=profile(tmp_path, "libaio"))

    assert settings.backend == "auto"
    assert "OFFLOAD_PURE=1" in caplog.text


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"backend": "tape"}, "`tape`"),
        ({"queue_depth": 10**6}, "`queue_depth` 1000000"),
        ({"block_bytes": 1 << 40}, "`block_bytes`"),
    ],
)
def test_settings_that_no_engine_can_have_are_named_with_their_path(tmp_path, change, found):
    (path,) = profile(tmp_path).paths
    known = MachineProfile(paths=(replace(path, **change),))

    with pytest.raises(ConfigError, match=f"profile has of path `{tmp_path}`.*{found}.*--tune"):
        measured_settings(tmp_path, profile=known)


def test_nominal_rates_are_those_of_the_profile_held_to_the_limits(tmp_path):
    known = profile(tmp_path / "a", mixed_bytes_per_s=3e8).merged(
        profile(tmp_path / "b", mixed_bytes_per_s=1e8)
    )
    paths = [tmp_path / "a" / "store", tmp_path / "b" / "store"]

    rates = nominal_rates(paths, probed=[5.0, 6.0], profile=known)

    assert rates == (3e8, 1e8)
    # Both directions together are limited.
    assert nominal_rates(paths, limits=[None, 5e7], profile=known) == (3e8, 2.5e7)


def test_where_the_profile_lacks_a_path_all_rates_are_those_that_were_probed(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    known = profile(tmp_path / "a", mixed_bytes_per_s=3e8)

    assert nominal_rates(paths, probed=[5.0, 6.0], profile=known) == (5.0, 6.0)
    assert nominal_rates(paths, profile=known) == (3e8, None)
