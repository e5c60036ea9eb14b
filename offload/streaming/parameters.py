"""A module's `_parameters`, which fetches a parameter that is used outside its module's call."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

OnAccess = Callable[[nn.Parameter], None]


class StreamedParameters(dict[str, nn.Parameter | None]):
    """The parameters of one module, by name.

    `module.weight` goes through `__getitem__`, which lets the engine fetch the unit (a weight
    tied by function). Iteration shows placeholders: `parameters()` fetches nothing.
    Copies and pickles are plain dicts with the real values.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], on_access: OnAccess) -> None:
        super().__init__(parameters)
        self._on_access = on_access

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None and not torch.compiler.is_compiling():
            self._on_access(parameter)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        copy: dict[str, nn.Parameter | None] = {}
        for name, parameter in self._fetched_items():
            if parameter is not None and id(parameter) not in memo:
                values = parameter.detach().clone(memory_format=torch.contiguous_format)
                memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            copy[name] = None if parameter is None else memo[id(parameter)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self._fetched_items())

    def _fetched_items(self) -> Iterator[tuple[str, nn.Parameter | None]]:
        for name in list(self):
            yield name, self[name]
