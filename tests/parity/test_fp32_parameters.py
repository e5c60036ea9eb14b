"""fp32 parameters under each order and overlap, beside the plain program."""

import pytest
import torch
from parity.models import SmallGPT, build
from parity.oracle import Reference
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_state, train_both

CHOICES = [("none", order) for order in ("sequential", "alternating", "resident")] + [
    (overlap, "resident") for overlap in ("forward", "backward", "both")
]


@pytest.mark.parametrize("codec", ["split", "fp32"])
@pytest.mark.parametrize(("overlap", "order"), CHOICES)
def test_no_order_overlap_or_codec_changes_a_bit(tmp_path, overlap, order, codec):
    reference = Reference(build(SmallGPT, dtype=torch.float32), **OPTIONS)
    with open_session(
        tmp_path, codec=codec, order=order, overlap=overlap, budget_bytes=2 << 20
    ) as session:
        model = session.wrap(build(SmallGPT, dtype=torch.float32))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3)

        require_equal_state(session, model, reference)
