"""Which modules' parameters form a unit: by module lists, or as the user says.

Without rules a unit is one element of a module list; where an element holds lists of its own,
their elements are the units. What is left (embeddings, heads, norms) is one unit per module that
owns parameters.
"""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from offload.config import UnitsConfig
from offload.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRules:
    """What the user says about units; everything left out is found from the module lists.

    Attributes:
        modules: Globs of module names; each module that matches is a unit.
        classes: Globs of class names; each module of such a class is a unit.
        largest_bytes: A module with more is divided into those inside it, as far as it has any.
        smallest_bytes: A unit with less joins a neighbour, unless that is in a module list; None:
            one 64th of the largest unit.
    """

    modules: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    largest_bytes: int | None = None
    smallest_bytes: int | None = None

    @staticmethod
    def of(config: UnitsConfig) -> "UnitRules":
        """Returns the rules that a configuration has."""
        return UnitRules(
            modules=config.modules,
            classes=config.classes,
            largest_bytes=config.largest,
            smallest_bytes=config.smallest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitModule:
    """A module that is a unit, and the modules whose own parameters the unit has."""

    name: str
    module: nn.Module
    members: tuple[nn.Module, ...]
    is_element: bool = False
    """It is an element of a module list, or what a rule named."""


def find_unit_modules(root: nn.Module, rules: UnitRules) -> list[UnitModule]:
    """Returns the units of `root`; of nested ones the inner come first.

    Raises:
        ConfigError: A glob matches no module.
    """
    found = _Search(root, rules).run()
    for key in ("modules", "classes"):
        _require_matches(root, key, getattr(rules, key))
    return found


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields what `module` owns itself. Fetches nothing, also while the model is being built."""
    for parameter in dict.values(module._parameters):
        if parameter is not None:
            yield parameter


def num_bytes_below(module: nn.Module) -> int:
    """Returns the bytes of all parameters of `module` and the modules inside it."""
    parameters = {id(p): p for each in module.modules() for p in own_parameters(each)}
    return sum(p.numel() * p.element_size() for p in parameters.values())


class _Search:
    def __init__(self, root: nn.Module, rules: UnitRules) -> None:
        self._root = root
        self._rules = rules
        self._named = {
            id(module)
            for name, module in root.named_modules()
            if module is not root and _is_named(name, module, rules)
        }
        self._taken: set[int] = set()

    def run(self) -> list[UnitModule]:
        units = list(self._below(self._root, ""))
        if self._root._parameters:
            units.insert(0, self._alone("root", self._root))
        return units

    def _below(self, module: nn.Module, prefix: str) -> Iterator[UnitModule]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if id(child) in self._named:
                yield from self._whole(child, path, is_element=True)
            elif is_list_of_modules(child):
                for element_name, element in child.named_children():
                    yield from self._whole(element, f"{path}.{element_name}", is_element=True)
            else:
                if child._parameters:
                    yield self._alone(path, child)
                yield from self._below(child, f"{path}.")

    def _whole(self, module: nn.Module, path: str, *, is_element: bool) -> Iterator[UnitModule]:
        """Yields units of which `module` is the largest that is possible."""
        has_lists = any(is_list_of_modules(child) for child in module.modules())
        is_divided = has_lists and id(module) not in self._named
        if is_divided or self._is_too_large(module):
            if module._parameters:
                yield self._alone(path, module, is_element=is_element)
            if is_divided:
                yield from self._below(module, f"{path}.")
                return
            for name, child in module.named_children():
                yield from self._whole(child, f"{path}.{name}", is_element=is_element)
            return
        for name, inside in module.named_modules():
            if inside is not module and id(inside) in self._named - self._taken:
                yield from self._whole(inside, f"{path}.{name}", is_element=True)
        members = tuple(self._members(module))
        self._taken.update(map(id, members))
        yield UnitModule(name=path, module=module, members=members, is_element=is_element)

    def _alone(self, path: str, module: nn.Module, *, is_element: bool = False) -> UnitModule:
        self._taken.add(id(module))
        return UnitModule(name=path, module=module, members=(module,), is_element=is_element)

    def _members(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yields `module` and those inside it that are in no other unit."""
        yield module
        for child in module.children():
            if id(child) not in self._taken:
                yield from self._members(child)

    def _is_too_large(self, module: nn.Module) -> bool:
        limit = self._rules.largest_bytes
        if limit is None or num_bytes_below(module) <= limit:
            return False
        return any(True for child in module.children() for _ in child.parameters())


def is_list_of_modules(module: nn.Module) -> bool:
    """Whether the elements of `module` are units."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and any(
        True for each in module.modules() for _ in own_parameters(each)
    )


def _is_named(name: str, module: nn.Module, rules: UnitRules) -> bool:
    by_name = any(fnmatch.fnmatchcase(name, pattern) for pattern in rules.modules)
    kind = type(module).__name__
    return by_name or any(fnmatch.fnmatchcase(kind, pattern) for pattern in rules.classes)


def _require_matches(root: nn.Module, key: str, patterns: tuple[str, ...]) -> None:
    names = {
        name if key == "modules" else type(module).__name__
        for name, module in root.named_modules()
        if module is not root
    }
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            examples = ", ".join(f"`{name}`" for name in sorted(names)[:5])
            raise ConfigError(
                f"cannot find units by `units.{key}` = `{pattern}`: expected a glob of "
                f"{'module' if key == 'modules' else 'class'} names, found none that matches "
                f"among {len(names)} such as {examples or 'none'}; correct it"
            )
