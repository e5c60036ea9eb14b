"""Random programs over a session equal the same programs in memory."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from model.session_programs import EmulatedSessionMachine, SessionMachine

MACHINES = {"cpu": SessionMachine, "emulated": EmulatedSessionMachine}


def run(device, num_programs, **options):
    run_state_machine_as_test(
        MACHINES[device],
        settings=settings(
            max_examples=num_programs,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", MACHINES)
def test_a_few_programs(device):
    run(device, 10, derandomize=True, phases=[Phase.generate])


@pytest.mark.stress
@pytest.mark.parametrize("device", MACHINES)
def test_many_programs(device):
    run(device, 400)
