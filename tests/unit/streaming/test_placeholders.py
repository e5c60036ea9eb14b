"""A write to what an absent parameter points to shows, whatever is written."""

import pytest
import torch

from offload.streaming.placeholders import Placeholder, find_written

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DTYPES = [*FLOATS, *INTEGERS, torch.bool]


@pytest.fixture(params=[True, False], ids=["read here", "asked of the device"])
def written(request):
    """Returns whether a placeholder was written to, told as on a CPU or as on a GPU."""

    def tell(placeholder):
        if not request.param:
            placeholder._memory = None
        return find_written({"weight": placeholder}) == ["weight"]

    return tell


@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_placeholder_looks_like_its_parameter_over_one_element(dtype, shape, written):
    parameter = torch.zeros(shape, dtype=dtype)

    placeholder = Placeholder(parameter)

    found = placeholder.tensor
    assert (found.shape, found.dtype) == (parameter.shape, dtype)
    assert found.untyped_storage().nbytes() == dtype.itemsize
    assert found.isnan().all() or dtype not in FLOATS
    assert not written(placeholder)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), 0.0, float("inf")], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_value_that_is_written_is_found(dtype, value, written):
    placeholder = Placeholder(torch.zeros(2, 3, dtype=dtype))

    placeholder.tensor.fill_(value)

    assert written(placeholder)


@pytest.mark.parametrize("compute", [
    lambda x: x.mul_(1.0), lambda x: x.add_(1.0), lambda x: x.neg_(), lambda x: x.abs_(),
    lambda x: x.sub_(x), lambda x: x.copy_(torch.full_like(x, torch.nan)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_that_is_computed_from_it_is_found(dtype, compute, written):
    placeholder = Placeholder(torch.zeros((), dtype=dtype))

    compute(placeholder.tensor)

    assert written(placeholder)


@pytest.mark.parametrize("value", [0, 1, 2, -1, 127, 255])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_an_integer_that_people_write_is_found(dtype, value, written):
    placeholder = Placeholder(torch.zeros(4, dtype=dtype))

    placeholder.tensor.fill_(torch.tensor(value).to(dtype).item())

    assert written(placeholder)


@pytest.mark.parametrize("shape", [(), (1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_its_own_value_is_found_when_it_is_written(dtype, shape):
    placeholder = Placeholder(torch.zeros(shape, dtype=dtype))
    value = placeholder.tensor.view(-1)[:1].item() if shape else placeholder.tensor.item()

    placeholder.tensor.fill_(value)

    assert placeholder.tensor.clone().eq(value).all(), "the test means to leave it as it was"
    assert find_written({"weight": placeholder}) == ["weight"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_operation_that_leaves_a_nan_its_bits_is_found(dtype, shape):
    placeholder = Placeholder(torch.zeros(shape, dtype=dtype))

    placeholder.tensor.clamp_(max=4.6)

    assert find_written({"scale": placeholder}) == ["scale"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reading_is_no_write(dtype):
    placeholder = Placeholder(torch.zeros(1, dtype=dtype))

    copies = [placeholder.tensor.clone(), placeholder.tensor.float() + 1, placeholder.tensor[0]]

    assert len(copies) == 3
    assert not find_written({"weight": placeholder})


def test_where_the_kernel_does_not_tell_of_writes_other_values_are_found(monkeypatch):
    monkeypatch.setattr("offload.streaming.placeholders.try_watch", lambda _: None)
    placeholder = Placeholder(torch.zeros(4, dtype=torch.int8))

    assert not find_written({"weight": placeholder})
    placeholder.tensor.fill_(3)

    assert find_written({"weight": placeholder}) == ["weight"]
