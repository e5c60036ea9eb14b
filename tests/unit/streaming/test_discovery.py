import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from offload.errors import ConfigError
from offload.streaming.discovery import discover_units
from offload.streaming.unit_modules import UnitRules


def linear():
    return nn.Linear(4, 4)


def names_of(model, **rules):
    """Returns each unit's name and the names of its parameters."""
    return {
        unit.facts.name: [p.name for p in unit.facts.parameters]
        for unit in discover_units(model, UnitRules(**rules)).units
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


def holding(values):
    module = nn.Module()
    module.values = nn.Parameter(values)
    return Tree(inside=module)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Tree(inside=nn.LazyLinear(4)), "`inside.weight`.*without a shape"),
        (holding(torch.eye(3).to_sparse()), "`inside.values`.*`torch.sparse_coo`"),
        (holding(TwoTensor(torch.eye(3), torch.eye(3))), "`inside.values`.*`TwoTensor`"),
        (Tree(inside=torch.jit.ScriptModule()), "module `inside`.*`ScriptModule`"),
    ],
    ids=["lazy", "sparse", "elsewhere", "script"],
)
def test_what_is_no_array_in_memory_is_refused_with_its_name(model, found):
    with pytest.raises(ConfigError, match=found):
        discover_units(model)


class TestRules:
    def test_a_glob_of_module_names_makes_units(self):
        model = Tree(encoder=nn.Sequential(linear(), nn.Sequential(linear(), linear())))

        names = names_of(model, modules=("encoder.?",))

        assert names == {
            "encoder.0": ["encoder.0.weight", "encoder.0.bias"],
            "encoder.1": [f"encoder.1.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")],
        }

    def test_a_class_makes_units(self):
        model = Tree(trunk=nn.Sequential(Part(linear(), linear()), Part(linear())), head=linear())

        names = names_of(model, classes=("Part",))

        assert list(names) == ["trunk.0", "trunk.1", "head"]
        assert len(names["trunk.0"]) == 4

    def test_of_nested_units_the_outer_has_what_the_inner_has_not(self):
        model = Tree(blocks=nn.ModuleList([Tree(up=linear(), mlp=nn.Sequential(linear()))]))

        discovered = discover_units(model, UnitRules(modules=("*.mlp",)))

        names = {u.facts.name: [p.name for p in u.facts.parameters] for u in discovered.units}
        assert names == {
            "blocks.0.mlp": ["blocks.0.mlp.0.weight", "blocks.0.mlp.0.bias"],
            "blocks.0": ["blocks.0.up.weight", "blocks.0.up.bias"],
        }
        assert discovered.needs[model.blocks[0]] == (1,)
        assert discovered.needs[model.blocks[0].mlp] == (0,)
        assert discovered.co_resident_units == 2

    def test_a_module_larger_than_the_limit_is_divided_as_far_as_it_has_parts(self):
        big = Tree(attention=linear(), mlp=nn.Sequential(linear(), nn.Linear(4, 64)))
        model = Tree(blocks=nn.ModuleList([linear(), big]))

        names = names_of(model, largest_bytes=200)

        assert list(names) == ["blocks.0", "blocks.1.attention", "blocks.1.mlp.0", "blocks.1.mlp.1"]

    def test_a_divided_module_keeps_what_it_owns_itself(self):
        big = Tree(one=linear(), two=linear())
        big.scale = nn.Parameter(torch.ones(3))

        names = names_of(Tree(blocks=nn.ModuleList([big])), largest_bytes=100)

        assert list(names) == ["blocks.0", "blocks.0.one", "blocks.0.two"]
        assert names["blocks.0"] == ["blocks.0.scale"]

    def test_tiny_units_join_a_neighbour_outside_module_lists(self):
        model = Tree(
            tokens=nn.Embedding(64, 32),
            blocks=nn.ModuleList([nn.Linear(64, 64), nn.LayerNorm(2)]),
            norm=nn.LayerNorm(2),
            head=nn.Linear(32, 60),
        )

        discovered = discover_units(model)

        names = [u.facts.name for u in discovered.units]
        assert names == ["tokens", "blocks.0", "blocks.1", "head"]
        assert discovered.needs[model.norm] == discovered.needs[model.head] == (3,)
        assert discovered.co_resident_units == 1

    def test_the_limit_below_which_units_join_can_be_set(self):
        model = Tree(one=linear(), two=linear(), big=nn.Linear(16, 16))

        assert list(names_of(model)) == ["one", "two", "big"]
        assert list(names_of(model, smallest_bytes=81)) == ["one", "big"]
        assert list(names_of(model, smallest_bytes=80)) == ["one", "two", "big"]

    def test_a_module_whose_call_runs_another_unit_joins_none(self):
        outer = Tree(inner=nn.Linear(32, 32))
        outer.scale = nn.Parameter(torch.ones(1))
        model = Tree(outer=outer, head=nn.Linear(32, 16))

        assert list(names_of(model)) == ["outer", "outer.inner", "head"]

    @pytest.mark.parametrize("key", ["modules", "classes"])
    def test_a_glob_that_matches_nothing_is_refused_with_examples(self, key):
        model = Tree(head=linear())

        with pytest.raises(ConfigError, match=rf"`units.{key}` = `nothing\*`.*such as `"):
            discover_units(model, UnitRules(**{key: ("nothing*",)}))


class Part(nn.Sequential):
    pass
