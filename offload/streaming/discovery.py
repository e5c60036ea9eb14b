"""Finds the units of a model: which modules' parameters move together.

`offload.streaming.unit_modules` says which modules are units; here are their parameters and which
calls need them. A unit that is tiny beside the largest joins a neighbour outside module lists: a
final norm goes with the head.
"""

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.errors import ConfigError
from offload.layout import DTYPES, ParameterFacts, UnitFacts
from offload.streaming.unit_modules import UnitRules, find_unit_modules, own_parameters

TINY_SHARE = 64
"""A unit with less than one part in so many of the largest joins a neighbour."""


@dataclass(slots=True, kw_only=True)
class DiscoveredUnit:
    """One unit of a module tree, with the live objects behind its facts."""

    modules: tuple[nn.Module, ...]
    """Whose calls hold it; several where tiny units were joined."""
    facts: UnitFacts
    parameters: dict[str, nn.Parameter]
    """By the name of its facts, in the order in which they are laid out."""
    is_element: bool = False
    """Its module is an element of a module list, or what a rule named."""
    is_wide: bool = False
    """It is one parameter that no slot holds; calls fetch tiles or rows of it."""

    @property
    def num_bytes(self) -> int:
        return sum(facts.num_bytes for facts in self.facts.parameters)


@dataclass(slots=True, kw_only=True)
class DiscoveredModel:
    """The units of a model, and which of them each module needs when it is called."""

    units: list[DiscoveredUnit]
    owners: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    """Units of the parameters that a module owns itself; modules without any are left out."""
    needs: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    """For the module of each unit: every unit that a call of it uses, tied ones included."""

    @property
    def wide(self) -> frozenset[int]:
        """The units that no call holds as a whole."""
        return frozenset(i for i, unit in enumerate(self.units) if unit.is_wide)

    @property
    def wide_names(self) -> frozenset[str]:
        """Their names, with the prefix that they have now."""
        return frozenset(unit.facts.name for unit in self.units if unit.is_wide)

    def prefix_units(self, prefix: str) -> None:
        """Puts `prefix` before the names of all units, under which a store keeps them."""
        for unit in self.units:
            unit.facts = UnitFacts(
                name=f"{prefix}{unit.facts.name}", parameters=unit.facts.parameters
            )

    co_resident_units: int = 1
    """The most units that are held at once: those of a call and of the calls around it."""


def discover_units(
    model: nn.Module, rules: UnitRules | None = None, *, wide: frozenset[str] = frozenset()
) -> DiscoveredModel:
    """Returns the units of `model` in the order of its modules.

    A tied parameter belongs to the first unit that has it. Each parameter named in `wide` is a
    unit of its own under its own name.

    Raises:
        ConfigError: A parameter has a dtype or layout that cannot be streamed, a module is a
            script, or a rule names nothing.
    """
    rules = UnitRules() if rules is None else rules
    require_no_scripts(model)
    names = _names_of_parameters(model)
    for parameter in _once(model):
        _require_plain(parameter, min(names[id(parameter)]))
    _require_apart(model, names)
    members: dict[int, tuple[nn.Module, ...]] = {}
    owned: set[int] = set()
    units: list[DiscoveredUnit] = []
    for found in find_unit_modules(model, rules):
        parameters: dict[str, nn.Parameter] = {}
        facts: list[ParameterFacts] = []
        for parameter in (p for member in found.members for p in own_parameters(member)):
            if id(parameter) in owned:
                continue
            owned.add(id(parameter))
            fact = _facts_of(parameter, names[id(parameter)])
            if fact.name in wide:
                units.append(_wide_unit(fact, parameter))
                continue
            facts.append(fact)
            parameters[fact.name] = parameter
        unit = DiscoveredUnit(
            modules=(found.module,),
            facts=UnitFacts(name=found.name, parameters=tuple(facts)),
            parameters=parameters,
            is_element=found.is_element,
        )
        units.append(unit)
        members[id(found.module)] = found.members
    discovered = DiscoveredModel(units=join_tiny_units(units, rules.smallest_bytes))
    owner_of = {
        id(parameter): index
        for index, unit in enumerate(discovered.units)
        for parameter in unit.parameters.values()
    }
    _record_needs(discovered, model, owner_of, members)
    discovered.co_resident_units = max(_most_held(discovered, model, frozenset()), 1)
    return discovered


def require_no_scripts(model: nn.Module) -> None:
    """Raises ConfigError where a module is one of `torch.jit`: its calls are not Python's."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"module `{name}`" if name else "the model"
            raise ConfigError(
                f"cannot stream {which}: expected a module of Python, found a "
                f"`{type(module).__name__}`, whose parameters `torch.jit` keeps; wrap the module "
                "that it was made from"
            )


def _most_held(model: DiscoveredModel, module: nn.Module, held: frozenset[int]) -> int:
    """Returns the most slots used in a call of `module`, those around it holding `held`.

    Of wide units one tile is in a slot at a time.
    """
    held |= set(model.needs.get(module, model.owners.get(module, ())))
    inner = (_most_held(model, child, held) for child in module.children())
    tiles = held & model.wide
    return max(len(held - tiles) + bool(tiles), *inner, 0)


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


def join_tiny_units(
    units: Sequence[DiscoveredUnit], smallest_bytes: int | None
) -> list[DiscoveredUnit]:
    """Returns the units, those with less than `smallest_bytes` joined to a neighbour.

    Elements of module lists, and modules whose calls run those of other units, stay apart. No unit
    grows beyond the largest, and ones without parameters go.
    """
    largest = max((unit.num_bytes for unit in units if not unit.is_wide), default=0)
    limit = -(-largest // TINY_SHARE) if smallest_bytes is None else smallest_bytes
    enclosing = _enclosing_modules(units)

    def may_join(unit: DiscoveredUnit) -> bool:
        is_apart = unit.is_element or unit.is_wide
        return not is_apart and not any(m in enclosing for m in unit.modules)

    joined: list[DiscoveredUnit] = []
    for unit in units:
        if not unit.parameters:
            continue
        before = joined[-1] if joined else None
        if (
            before is not None
            and min(before.num_bytes, unit.num_bytes) < limit
            and before.num_bytes + unit.num_bytes <= largest
            and may_join(before)
            and may_join(unit)
        ):
            joined[-1] = _join(before, unit)
        else:
            joined.append(unit)
    return joined


def _enclosing_modules(units: Sequence[DiscoveredUnit]) -> set[nn.Module]:
    """The modules of units that contain the module of another unit."""
    every = {module for unit in units for module in unit.modules}
    return {
        module
        for module in every
        if any(inside in every for inside in module.modules() if inside is not module)
    }


def _wide_unit(fact: ParameterFacts, parameter: nn.Parameter) -> DiscoveredUnit:
    return DiscoveredUnit(
        modules=(),
        facts=UnitFacts(name=fact.name, parameters=(fact,)),
        parameters={fact.name: parameter},
        is_wide=True,
    )


def _join(one: DiscoveredUnit, other: DiscoveredUnit) -> DiscoveredUnit:
    name = max((one, other), key=lambda unit: unit.num_bytes).facts.name
    return DiscoveredUnit(
        modules=one.modules + other.modules,
        facts=UnitFacts(name=name, parameters=one.facts.parameters + other.facts.parameters),
        parameters={**one.parameters, **other.parameters},
    )


def _record_needs(
    model: DiscoveredModel,
    root: nn.Module,
    owner_of: dict[int, int],
    members: dict[int, tuple[nn.Module, ...]],
) -> None:
    for module in root.modules():
        owned = {owner_of[id(p)] for p in own_parameters(module)}
        if owned:
            model.owners[module] = tuple(sorted(owned))
    for unit in model.units:
        for module in unit.modules:
            inside = (p for member in members[id(module)] for p in own_parameters(member))
            model.needs[module] = tuple(sorted({owner_of[id(p)] for p in inside}))


def _names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in dict.items(module._parameters):
            if parameter is not None:
                full = f"{path}.{name}" if path else name
                names.setdefault(id(parameter), []).append(full)
    return names


def _require_apart(model: nn.Module, names: dict[int, list[str]]) -> None:
    """Refuses parameters that share memory without being one: they would come apart."""
    spans = sorted(
        (p.untyped_storage().data_ptr(), p.storage_offset() * p.element_size(), index, p)
        for index, p in enumerate(_once(model))
        if p.numel() and not p.is_meta and p.is_contiguous()
    )
    for (base, start, _, before), (other, begin, _, after) in itertools.pairwise(spans):
        if base == other and start + before.numel() * before.element_size() > begin:
            raise ConfigError(
                f"cannot stream parameters `{names[id(before)][0]}` and `{names[id(after)][0]}`: "
                "expected memory of their own, found memory that they share; use one "
                "`nn.Parameter` object in both places, or clone one"
            )


def _once(model: nn.Module) -> Iterator[nn.Parameter]:
    seen: set[int] = set()
    for module in model.modules():
        for parameter in own_parameters(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _require_plain(parameter: nn.Parameter, name: str) -> None:
    """Refuses parameters whose values are not an array in memory of their own."""
    remedy = "convert the parameter before `wrap`"
    if isinstance(parameter, nn.UninitializedParameter):
        found, remedy = "one without a shape yet", "run the model once before `wrap`"
    elif type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        found = f"a `{type(parameter).__name__}`, which keeps its values elsewhere"
    elif parameter.is_nested or parameter.layout is not torch.strided:
        found = "a nested one" if parameter.is_nested else f"the layout `{parameter.layout}`"
    else:
        return
    raise ConfigError(
        f"cannot stream parameter `{name}`: expected an array in memory, found {found}; {remedy}"
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
