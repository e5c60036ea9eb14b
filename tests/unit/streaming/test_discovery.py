import pytest
import torch
from torch import nn

from offload.errors import ConfigError
from offload.streaming.discovery import discover_units


def linear():
    return nn.Linear(4, 4)


def names_of(model):
    """Returns each unit's name and the names of its parameters."""
    return {
        unit.facts.name: [p.name for p in unit.facts.parameters]
        for unit in discover_units(model).units
    }


class Tree(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def test_each_element_of_a_module_list_is_a_unit_and_what_is_left_one_per_module():
    model = Tree(
        tokens=nn.Embedding(8, 4), blocks=nn.ModuleList([linear(), linear()]), head=linear()
    )

    assert names_of(model) == {
        "tokens": ["tokens.weight"],
        "blocks.0": ["blocks.0.weight", "blocks.0.bias"],
        "blocks.1": ["blocks.1.weight", "blocks.1.bias"],
        "head": ["head.weight", "head.bias"],
    }


def test_an_element_with_children_is_one_unit():
    block = Tree(norm=nn.LayerNorm(4), mlp=nn.Sequential(linear(), nn.GELU(), linear()))

    names = names_of(Tree(blocks=nn.ModuleList([block])))

    assert list(names) == ["blocks.0"]
    assert len(names["blocks.0"]) == 6


def test_elements_of_nested_lists_are_the_units():
    layer = Tree(router=linear(), experts=nn.ModuleList([linear(), linear()]))

    names = names_of(Tree(layers=nn.ModuleList([layer])))

    assert list(names) == ["layers.0.router", "layers.0.experts.0", "layers.0.experts.1"]


def test_lists_deep_below_other_modules_are_found():
    model = Tree(decoder=Tree(inner=Tree(layers=nn.ModuleList([linear()]), norm=nn.LayerNorm(4))))

    assert list(names_of(model)) == ["decoder.inner.layers.0", "decoder.inner.norm"]


def test_module_dicts_count_as_lists():
    model = Tree(parts=nn.ModuleDict({"a": linear(), "b": linear()}))

    assert list(names_of(model)) == ["parts.a", "parts.b"]


def test_a_list_without_parameters_is_no_unit():
    model = Tree(acts=nn.ModuleList([nn.GELU()]), head=linear())

    assert list(names_of(model)) == ["head"]


def test_parameters_of_the_root_are_a_unit():
    model = Tree(blocks=nn.ModuleList([linear()]))
    model.scale = nn.Parameter(torch.ones(()))

    assert names_of(model)["root"] == ["scale"]


def test_a_parameter_list_is_a_unit():
    model = Tree(mixes=nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)]))

    assert names_of(model) == {"mixes": ["mixes.0", "mixes.1", "mixes.2"]}


def test_parameters_beside_a_list_inside_an_element_are_a_unit_of_their_own():
    layer = Tree(experts=nn.ModuleList([linear()]))
    layer.gate = nn.Parameter(torch.ones(4))

    names = names_of(Tree(layers=nn.ModuleList([layer])))

    assert names["layers.0"] == ["layers.0.gate"]
    assert names["layers.0.experts.0"] == ["layers.0.experts.0.weight", "layers.0.experts.0.bias"]


def test_a_tied_parameter_is_in_the_first_unit_under_its_smallest_name():
    model = Tree(tokens=nn.Embedding(4, 4), blocks=nn.ModuleList([linear()]), head=linear())
    model.head.weight = model.tokens.weight

    discovered = discover_units(model)

    facts = discovered.units[0].facts.parameters[0]
    assert (facts.name, facts.aliases) == ("head.weight", ("tokens.weight",))
    assert [u.facts.name for u in discovered.units] == ["tokens", "blocks.0", "head"]
    assert [p.name for p in discovered.units[2].facts.parameters] == ["head.bias"]
    assert discovered.needs[model.head] == (0, 2)
    assert discovered.owners[model.head] == (0, 2)
    assert discovered.co_resident_units == 2


def test_a_module_that_is_used_under_two_names_is_in_one_unit():
    shared = linear()
    model = Tree(blocks=nn.ModuleList([shared, linear(), shared]))

    discovered = discover_units(model)

    assert [u.facts.name for u in discovered.units] == ["blocks.0", "blocks.1"]
    assert discovered.units[0].facts.parameters[0].aliases == ("blocks.2.weight",)
    assert discovered.co_resident_units == 1


def test_facts_say_shape_dtype_and_trainability():
    model = Tree(head=nn.Linear(3, 5, dtype=torch.bfloat16))
    model.head.bias.requires_grad_(False)

    weight, bias = discover_units(model).units[0].facts.parameters

    assert (weight.shape, weight.dtype, weight.is_trainable) == ((5, 3), "bfloat16", True)
    assert (bias.shape, bias.dtype, bias.is_trainable) == ((5,), "bfloat16", False)


def test_every_parameter_is_in_exactly_one_unit():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    model.extra = nn.Parameter(torch.ones(1))

    units = discover_units(model).units

    found = [p for unit in units for p in unit.parameters.values()]
    assert {id(p) for p in found} == {id(p) for p in model.parameters()}
    assert len(found) == len(list(model.parameters()))


def test_a_model_without_parameters_has_no_units_and_needs_one_slot():
    discovered = discover_units(nn.Sequential(nn.GELU()))

    assert discovered.units == []
    assert discovered.co_resident_units == 1


def test_a_dtype_that_cannot_be_streamed_is_refused_with_its_name():
    model = Tree(head=linear())
    model.head.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    with pytest.raises(ConfigError, match=r"`head.phase`.*found `complex64`"):
        discover_units(model)
