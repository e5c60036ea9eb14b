"""Finds the units of a model: which modules' parameters move together.

A unit is one element of a module list; where an element holds most of its bytes in lists of its
own, their elements are the units. What is left (embeddings, heads, final norms) is one unit per
module that owns parameters.
"""

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from offload.errors import ConfigError
from offload.layout import DTYPES, ParameterFacts, UnitFacts


@dataclass(slots=True, kw_only=True)
class DiscoveredUnit:
    """One unit of a module tree, with the live objects behind its facts."""

    module: nn.Module
    facts: UnitFacts
    parameters: dict[str, nn.Parameter]
    """By the name of its facts, in the order in which they are laid out."""
    is_element: bool = False
    """Its module is an element of a module list."""


@dataclass(slots=True, kw_only=True)
class DiscoveredModel:
    """The units of a model, and which of them each module needs when it is called."""

    units: list[DiscoveredUnit]
    owners: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    """Units of the parameters that a module owns itself; modules without any are left out."""
    needs: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    """For the module of each unit: every unit that a call of it uses, tied ones included."""

    co_resident_units: int = 1
    """The most units that are held at once: those of a call and of the calls around it."""


def discover_units(model: nn.Module) -> DiscoveredModel:
    """Returns the units of `model` in the order of its modules.

    A tied parameter belongs to the first unit that has it.

    Raises:
        ConfigError: A parameter has a dtype or layout that cannot be streamed.
    """
    names = _names_of_parameters(model)
    _require_apart(model, names)
    owner_of: dict[int, int] = {}
    discovered = DiscoveredModel(units=[])
    for name, module in _unit_modules(model):
        parameters: dict[str, nn.Parameter] = {}
        facts: list[ParameterFacts] = []
        for parameter in module.parameters(recurse=not _is_leftover(module, model)):
            if id(parameter) in owner_of:
                continue
            owner_of[id(parameter)] = len(discovered.units)
            fact = _facts_of(parameter, names[id(parameter)])
            facts.append(fact)
            parameters[fact.name] = parameter
        if facts:
            unit_facts = UnitFacts(name=name, parameters=tuple(facts))
            discovered.units.append(
                DiscoveredUnit(
                    module=module,
                    facts=unit_facts,
                    parameters=parameters,
                    is_element=_is_element(model, name),
                )
            )
    _record_needs(discovered, model, owner_of)
    discovered.co_resident_units = max(_most_held(discovered, model, frozenset()), 1)
    return discovered


def _most_held(model: DiscoveredModel, module: nn.Module, held: frozenset[int]) -> int:
    """Returns the most units held in a call of `module`, those around it holding `held`."""
    held |= set(model.needs.get(module, model.owners.get(module, ())))
    inner = (_most_held(model, child, held) for child in module.children())
    return max(len(held), *inner, 0)


def whole_matrices(model: DiscoveredModel, patterns: Sequence[str]) -> frozenset[str]:
    """Returns the names of the parameters that Muon takes.

    These are the trainable matrices in elements of module lists, so not embeddings and heads,
    whose names match one of the glob patterns.
    """
    return frozenset(
        facts.name
        for unit in model.units
        if unit.is_element
        for facts in unit.facts.parameters
        if facts.is_trainable and len(facts.shape) == 2 and facts.num_elements
        if any(fnmatch.fnmatchcase(facts.name, pattern) for pattern in patterns)
    )


def _is_element(root: nn.Module, name: str) -> bool:
    parent, _, _ = name.rpartition(".")
    return bool(parent) and _is_list_of_modules(root.get_submodule(parent))


def _record_needs(model: DiscoveredModel, root: nn.Module, owner_of: dict[int, int]) -> None:
    for module in root.modules():
        owned = {owner_of[id(p)] for p in module._parameters.values() if p is not None}
        if owned:
            model.owners[module] = tuple(sorted(owned))
    for unit in model.units:
        recurse = not _is_leftover(unit.module, root)
        needed = {owner_of[id(p)] for p in unit.module.parameters(recurse=recurse)}
        model.needs[unit.module] = tuple(sorted(needed))


def _names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _require_apart(model: nn.Module, names: dict[int, list[str]]) -> None:
    """Refuses parameters that share memory without being one: they would come apart."""
    spans = sorted(
        (p.untyped_storage().data_ptr(), p.storage_offset() * p.element_size(), index, p)
        for index, p in enumerate(_without_fetching(model))
        if p.numel() and not p.is_meta and p.is_contiguous()
    )
    for (base, start, _, before), (other, begin, _, after) in itertools.pairwise(spans):
        if base == other and start + before.numel() * before.element_size() > begin:
            raise ConfigError(
                f"cannot stream parameters `{names[id(before)][0]}` and `{names[id(after)][0]}`: "
                "expected memory of their own, found memory that they share; use one "
                "`nn.Parameter` object in both places, or clone one"
            )


def _without_fetching(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields every parameter once; while a model is built, iteration would fetch and evict."""
    seen: set[int] = set()
    for module in model.modules():
        for parameter in dict.values(module._parameters):
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _is_leftover(module: nn.Module, root: nn.Module) -> bool:
    """Whether `module`'s unit takes only the parameters that it owns itself.

    So it is for the root and for every module that contains module lists.
    """
    return module is root or any(_is_list_of_modules(child) for child in module.modules())


def _unit_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the module of each unit, in the order of `named_modules`."""
    if root._parameters:
        yield "root", root
    yield from _units_below(root, "")


def _units_below(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_list_of_modules(child):
            for element_name, element in child.named_children():
                yield from _units_of_element(element, f"{path}.{element_name}")
        else:
            if child._parameters:
                yield path, child
            yield from _units_below(child, f"{path}.")


def _units_of_element(element: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    if any(_is_list_of_modules(child) for child in element.modules()):
        if element._parameters:
            yield path, element
        yield from _units_below(element, f"{path}.")
    else:
        yield path, element


def _is_list_of_modules(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and any(
        True for _ in module.parameters()
    )


def _facts_of(parameter: nn.Parameter, names: list[str]) -> ParameterFacts:
    name, *aliases = sorted(names)
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(
            f"cannot stream parameter `{name}`: expected a dtype of {', '.join(DTYPES)}, found "
            f"`{dtype}`; convert the parameter before `wrap`"
        )
    return ParameterFacts(
        name=name,
        aliases=tuple(aliases),
        shape=tuple(parameter.shape),
        dtype=dtype,
        is_trainable=parameter.requires_grad,
    )
