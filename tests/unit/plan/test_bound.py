import pytest

from offload.plan.bound import ComputeTimes, step_bound
from offload.plan.machine import Machine, PathRates
from offload.plan.traffic import ModelBytes, step_traffic

GB = 10**9


def path(read, write, mixed):
    return PathRates(
        path="/a",
        read_bytes_per_s=read * GB,
        write_bytes_per_s=write * GB,
        mixed_bytes_per_s=mixed * GB,
    )


def machine(*paths):
    return Machine(paths=paths, copy_bytes_per_s=40 * GB, update_parameters_per_s=2 * GB)


def test_one_path_moves_both_ways_first_and_the_rest_alone():
    one = machine(path(2, 1, 0.5))

    assert one.transfer_s(read_bytes=3 * GB, write_bytes=1 * GB) == pytest.approx(1 / 0.5 + 2 / 2)
    assert one.transfer_s(read_bytes=1 * GB, write_bytes=3 * GB) == pytest.approx(1 / 0.5 + 2 / 1)
    assert one.transfer_s(read_bytes=0, write_bytes=0) == 0


def test_two_paths_share_the_bytes_by_their_speed():
    both = machine(path(2, 1, 0.5), path(4, 2, 1.0))

    # 3 s and 1.5 s alone: together 1 / (1/3 + 1/1.5).
    assert both.transfer_s(read_bytes=3 * GB, write_bytes=1 * GB) == pytest.approx(1.0)


def test_passes_take_the_longer_of_compute_and_reads_and_the_update_comes_after():
    model = ModelBytes(
        parameter_bytes=GB,
        trainable_parameter_bytes=GB,
        update_parameter_bytes=GB,
        state_bytes=5 * GB,
    )
    traffic = step_traffic(model, parameters="storage", optimizer="storage", micro_steps=1)

    bound = step_bound(
        machine(path(2, 2, 1)),
        traffic,
        num_parameters=GB // 2,
        compute=[ComputeTimes(forward_s=0.1, backward_s=0.9)],
    )

    # Reads of 1 GB take 0.5 s: longer than forward, shorter than backward. The update moves 6 GB
    # both ways at 1 GB/s; memory would take 0.25 s + 12/40 s.
    assert bound.update_s == pytest.approx(6.0)
    assert bound.step_s == pytest.approx(0.5 + 0.9 + 6.0)


def test_memory_bounds_an_update_that_storage_does_not():
    model = ModelBytes(
        parameter_bytes=0, trainable_parameter_bytes=0, update_parameter_bytes=0, state_bytes=0
    )
    traffic = step_traffic(model, parameters="host", optimizer="host", micro_steps=1)

    bound = step_bound(
        machine(path(2, 2, 1)),
        traffic,
        num_parameters=GB,
        compute=[ComputeTimes(forward_s=0.1, backward_s=0.2)],
    )

    assert bound.update_s == pytest.approx(0.5)
    assert bound.step_s == pytest.approx(0.8)
