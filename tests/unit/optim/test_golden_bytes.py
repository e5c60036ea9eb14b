"""The bytes of both codecs, written out: a store that is read again in years holds these."""

import numpy as np
import pytest
import torch

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.optim.kernels import Operands, Range, adamw_scalars, kernel_names, load_kernels

# 1, a tie, a tie below zero, a carry into the exponent, the least subnormal, infinity.
MASTERS = ["3f800001", "3f808000", "bf808000", "3f7f8000", "00000001", "7f800000", "80000000"]
GRADIENTS = ["3f80", "bf80", "4000", "0000", "3f80", "3f80", "0000"]
PARAMETER = "803f 813f 81bf 803f 0000 807f 0080"
GOLDEN = {
    # After one AdamW step with lr 0: master_low, then exp_avg, exp_avg_sq.
    "split": "0100 0080 0080 0080 0100 0000 0000",
    "fp32": "0100803f 0080803f 008080bf 00807f3f 01000000 0000807f 00000080",
}
EXP_AVG = "cdcccc3d cdccccbd cdcc4c3e 00000000 cdcccc3d cdcccc3d 00000000"
EXP_AVG_SQ = "cdcc4c3d cdcc4c3d cdcc4c3e 00000000 cdcc4c3d cdcc4c3d 00000000"


def hexadecimal(values: torch.Tensor) -> str:
    size = values.element_size()
    raw = values.view(torch.uint8).numpy().tobytes()
    return " ".join(raw[i : i + size].hex() for i in range(0, len(raw), size))


@pytest.mark.parametrize("name", kernel_names())
@pytest.mark.parametrize("codec", ["split", "fp32"])
def test_a_step_writes_these_bytes(codec: str, name: str) -> None:
    bits = np.array([int(text, 16) for text in MASTERS], np.uint32)
    master = torch.from_numpy(bits.view(np.float32).copy())
    high = ((bits + 0x8000) >> 16).astype(np.uint16)
    gradient = np.array([int(text, 16) for text in GRADIENTS], np.uint16)
    low = torch.from_numpy((bits & 0xFFFF).astype(np.uint16).view(np.int16))
    operands = Operands(
        parameter=torch.from_numpy(high.view(np.int16)).view(torch.bfloat16),
        gradient=torch.from_numpy(gradient.view(np.int16)).view(torch.bfloat16),
        state={"exp_avg": torch.zeros(7), "exp_avg_sq": torch.zeros(7)},
        master_low=low if codec == "split" else None,
        master=master if codec == "fp32" else None,
    )
    scalars = adamw_scalars(lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1)

    load_kernels(name).update(operands, [Range(start=0, stop=7, scalars=scalars)])

    stored = operands.master_low if codec == "split" else operands.master
    assert stored is not None
    assert hexadecimal(operands.parameter) == PARAMETER
    assert hexadecimal(stored) == GOLDEN[codec]
    assert hexadecimal(operands.state["exp_avg"]) == EXP_AVG
    assert hexadecimal(operands.state["exp_avg_sq"]) == EXP_AVG_SQ


@pytest.mark.parametrize(
    ("codec", "dtype", "rule", "expected"),
    [
        # docs/state-format.md: 100 elements, sections at multiples of 64 bytes.
        ("split", "bfloat16", "adamw", "master_low 0 200, exp_avg 256 400, exp_avg_sq 704 400"),
        ("fp32", "bfloat16", "adamw", "master 0 400, exp_avg 448 400, exp_avg_sq 896 400"),
        ("fp32", "float16", "lion", "master 0 400, exp_avg 448 400"),
        ("split", "float32", "momentum", "momentum_buffer 0 400"),
        ("split", "bfloat16", "adagrad", "master_low 0 200, sum 256 400"),
        ("split", "bfloat16", "sgd", "master_low 0 200"),
        ("split", "float32", "sgd", ""),
    ],
)
def test_a_record_has_its_sections_there(codec: str, dtype: str, rule: str, expected: str) -> None:
    facts = ParameterFacts(name="w", shape=(100,), dtype=dtype)
    layout = build_layout([UnitFacts(name="u", parameters=(facts,))], codec=codec, rule=rule)

    (record,) = layout.records

    found = [f"{s.name} {s.offset_bytes} {s.num_bytes}" for s in record.sections]
    assert ", ".join(found) == expected
