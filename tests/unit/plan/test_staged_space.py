import pytest

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.storage import store_space


@pytest.mark.parametrize(("durability", "alone"), [("none", 1), ("commit", 2)])
def test_versions_that_wait_for_their_step_take_space_of_their_own(durability, alone):
    facts = ParameterFacts(name="p", shape=(5000,), dtype="bfloat16")
    layout = build_layout([UnitFacts(name="u", parameters=(facts,))], codec="split")
    options = {"block_bytes": 4096, "durability": durability, "num_buffers": 1}

    plain = store_space(layout, **options)
    staged = store_space(layout, is_staged=True, **options)

    assert (plain.num_versions, staged.num_versions) == (alone, alone + 1)
    assert staged.total_bytes - plain.total_bytes == plain.version_bytes
