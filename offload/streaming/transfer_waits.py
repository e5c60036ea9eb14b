"""What a wait for transfers of units was for, part by part."""

import time
from collections.abc import Sequence

from offload.optim.handover import HandedOver
from offload.streaming.parameter_tier import ParameterTier
from offload.streaming.unit import Transfer


def wait_by_parts(tier: ParameterTier, transfers: Sequence[Transfer]) -> dict[str, float]:
    """Waits for transfers and returns the seconds by what each part of it was for.

    Those for updates are left out: they are counted where these run.

    Args:
        tier: What the transfers are of.
        transfers: Waited for one after the other; what one raises is raised.
    """
    waited_s: dict[str, float] = {}
    for transfer in transfers:
        if isinstance(transfer, HandedOver):
            continue
        is_left = True
        while is_left:
            waits_for, started_s = tier.waits_for([transfer]), time.perf_counter()
            is_left = tier.wait_part([transfer])
            if not is_left:
                transfer.wait()
            duration_s = time.perf_counter() - started_s
            waited_s[waits_for] = waited_s.get(waits_for, 0.0) + duration_s
    return waited_s
