"""What stands around a resident model's modules while its parameters must not be used."""

from collections.abc import Callable
from typing import Any

from torch import nn

from offload.streaming.parameters import PickledCopies, StreamedParameters
from offload.streaming.swap import Attachment, Call, attach_around, detach_around


class Refusal:
    """Refuses calls, parameters as attributes, and state dicts; iteration shows parameters.

    Concurrency: The thread that runs the model.
    """

    def __init__(self, model: nn.Module, require_usable: Callable[[], None]) -> None:
        """Stores its arguments.

        Args:
            model: Whose modules have plain parameters.
            require_usable: Raises what says why they are refused.
        """
        self._model = model
        self._require_usable = require_usable
        self._modules: list[nn.Module] = []

    def open(self) -> None:
        """Lays itself around the modules that have parameters, and around the model."""
        pickled = PickledCopies()
        for module in list(self._model.modules()):
            if module is self._model or module._parameters:
                self._modules.append(module)
                attach_around(module, _Refusing(self._require_usable))
                module.__dict__["_parameters"] = StreamedParameters(
                    module._parameters, lambda _: self._require_usable(), pickled
                )

    def close(self) -> None:
        """Gives the modules back what they had; may be called again."""
        modules, self._modules = self._modules, []
        for module in modules:
            module.__dict__["_parameters"] = dict(dict.items(module._parameters))
            detach_around(module)


class _Refusing:
    """Around one module; see `offload.streaming.swap.OuterAttachment`."""

    def __init__(self, require_usable: Callable[[], None]) -> None:
        self.inner: Attachment | None = None
        self.is_unit = True  # also for a compiler: what it traced would ask nobody
        self._require_usable = require_usable

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._require_usable()
        return call(*args, **kwargs) if self.inner is None else self.inner.run(call, args, kwargs)

    def fill_state_dict(self, module: nn.Module, values: dict[str, Any], prefix: str) -> None:
        del module, values, prefix
        self._require_usable()

    def before_load(self, module: nn.Module) -> None:
        del module
        self._require_usable()

    def after_load(self, module: nn.Module) -> None:
        del module
