"""The least time of a simulated step: its bytes and its compute at the machine's rates."""

from offload.plan.machine import Machine
from offload.plan.simulation import SimulatedStep
from offload.plan.systems import SystemRun


def least_step_s(system: SystemRun, rates: Machine, step: SimulatedStep) -> float:
    """Returns the sum over phases of the longer of compute and transfers in each.

    The phases that carry the update under the policy's overlap take its bytes and its kernels too.
    """
    work = system.work
    passes = [
        sum(unit.forward_s for unit in work.units),
        sum(unit.backward_s for unit in work.units),
    ] * work.micro_steps
    pieces = sum(piece.num_bytes for record in work.records for piece in record.pieces)
    fetched = pieces + sum(unit.frozen_bytes for unit in work.units)
    spilled = sum(record.spilled_bytes for record in work.records)
    reads = [fetched + (spilled if place % 2 and place > 1 else 0) for place in range(len(passes))]
    writes = [spilled * (place % 2) for place in range(len(passes))]
    update_reads = step.read_bytes - sum(reads)
    update_writes = step.write_bytes - sum(writes)
    kernels_s = system.layout.trainable_elements / rates.update_parameters_per_s

    def phase_s(compute_s: float, read_bytes: int, write_bytes: int) -> float:
        moving_s = rates.transfer_s(read_bytes=read_bytes, write_bytes=write_bytes)
        return max(compute_s, moving_s)

    carriers = {"forward": [0], "backward": [-1], "both": [-1, 0]}.get(system.policy["overlap"], [])
    plain = [
        phase_s(compute_s, reads[place], writes[place])
        for place, compute_s in enumerate(passes)
        if place not in carriers and place - len(passes) not in carriers
    ]
    carried = phase_s(
        max(sum(passes[place] for place in carriers), kernels_s),
        sum(reads[place] for place in carriers) + update_reads,
        sum(writes[place] for place in carriers) + update_writes,
    )
    prefetched_s = _prefetched_s(system, rates) if carriers == [0] else 0.0
    return sum(plain) + max(carried - prefetched_s, 0.0) + work.other_s


def _prefetched_s(system: SystemRun, rates: Machine) -> float:
    """The most that reading ahead during the backward before can take off the next forward."""
    record_bytes = max(record.state_bytes for record in system.work.records)
    window = system.make_policy().window.num_buffers * record_bytes
    return rates.transfer_s(read_bytes=window, write_bytes=0)
