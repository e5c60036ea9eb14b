"""The engine takes the settings that were measured for a path."""

from pathlib import Path

from offload.plan.machine_profile import MachineProfile, PathProfile
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings


def profile(path, backend="aiofiles"):
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
                mixed_bytes_per_s=1.0,
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
