"""A module's `_parameters`, which fetches a parameter that is used outside its module's call."""

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.errors import StoreError

logger = logging.getLogger("offload.streaming")

OnAccess = Callable[[int], None]
"""Takes the id of the parameter: a reference would be counted among those of others."""
PickledCopies = weakref.WeakValueDictionary[tuple[int, int], nn.Parameter]
"""The copies of a model's parameters that a pickler holds now, by id and version: a tied parameter
is pickled once."""


class ClosedParameters(dict[str, nn.Parameter | None]):
    """The parameters of a module whose session is closed: every look at them is refused."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], *, found: str) -> None:
        """Takes the parameters.

        Args:
            parameters: Of one module.
            found: Why they are refused, and what to do, for the message.
        """
        super().__init__(parameters)
        self._found = found

    def __getitem__(self, name: str) -> nn.Parameter | None:
        raise self._error(name)

    def items(self) -> Any:
        """Refuses, as every access does."""
        raise self._error(next(iter(self), ""))

    def values(self) -> Any:
        """Refuses, as every access does."""
        raise self._error(next(iter(self), ""))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise self._error(next(iter(self), ""))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._error(next(iter(self), ""))

    def _error(self, name: str) -> StoreError:
        return StoreError(f"cannot use parameter `{name}`: its session is closed and {self._found}")


def close_parameters(module: nn.Module, *, found: str) -> None:
    """Has every look at a module's parameters refused; see `ClosedParameters`."""
    items = dict.items(module._parameters)
    module.__dict__["_parameters"] = ClosedParameters(dict(items), found=found)


def close_mixed(model: nn.Module, failure: BaseException) -> None:
    """Has the parameters of a model refused that `failure` left between two steps."""
    logger.warning(
        "the parameters of a model keep values of two steps, since an update failed (%s); "
        "resume from the last commit",
        failure,
    )
    found = (
        f"its values are of two steps, as an update failed ({failure}); build the model anew "
        "and wrap it in a session that resumes from the last commit"
    )
    for module in model.modules():
        if module._parameters:
            close_parameters(module, found=found)


class StreamedParameters(dict[str, nn.Parameter | None]):
    """The parameters of one module, by name.

    `module.weight` goes through `__getitem__`, which lets the engine fetch the unit (a weight
    tied by function). Iteration shows placeholders: `parameters()` fetches nothing.
    Copies and pickles are plain dicts with the real values.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter | None],
        on_access: OnAccess,
        pickled: PickledCopies,
    ) -> None:
        super().__init__(parameters)
        self._on_access = on_access
        self._pickled = pickled

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if not torch.compiler.is_compiling():
            self._on_access(id(super().__getitem__(name)))
        return super().__getitem__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        copied: dict[str, nn.Parameter | None] = {}
        for name, parameter in self._fetched_items():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _plain_copy(parameter)
            copied[name] = None if parameter is None else memo[id(parameter)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, zip(self, self.pickled(dict.values(self)), strict=True)

    def list_of(self, values: list[Any]) -> "ListedParameters | None":
        """Returns a list of these parameters that copies as they do; None if others are in it."""
        own = {id(None), *map(id, dict.values(self))}
        return (
            ListedParameters(values, self) if values and own.issuperset(map(id, values)) else None
        )

    def pickled(self, parameters: Iterable[nn.Parameter | None]) -> Iterator[nn.Parameter | None]:
        """Yields copies: a pickler keeps what it has seen, and would keep every slot."""
        for parameter in parameters:
            if parameter is None:
                yield None
                continue
            self._on_access(id(parameter))
            key = id(parameter), parameter._version
            pickled = self._pickled.get(key)
            if pickled is None:
                pickled = self._pickled[key] = _plain_copy(parameter)
            yield pickled

    def _fetched_items(self) -> Iterator[tuple[str, nn.Parameter | None]]:
        for name in list(self):
            yield name, self[name]


class ListedParameters(list[nn.Parameter | None]):
    """What a module lists of its parameters beside them, as recurrent layers of torch do.

    Copies and pickles are plain lists of the copied parameters.
    """

    def __init__(self, values: list[nn.Parameter | None], parameters: StreamedParameters) -> None:
        super().__init__(values)
        self._parameters = parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> list[nn.Parameter | None]:
        copy.deepcopy(self._parameters, memo)
        return [None if parameter is None else memo[id(parameter)] for parameter in self]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (), None, self._parameters.pickled(self)


def _plain_copy(parameter: nn.Parameter) -> nn.Parameter:
    values = parameter.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
