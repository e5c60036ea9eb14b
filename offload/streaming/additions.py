"""Parameters that a model got after it was wrapped."""

import itertools
import logging
from collections.abc import Iterable, Iterator

from torch import nn

from offload.sizes import format_size
from offload.streaming.messages import listed
from offload.streaming.unit_modules import own_parameters

_LOG = logging.getLogger("offload.streaming")


class Additions:
    """Finds the parameters that nothing keeps but the program, and names each once.

    A look compares the identities of all modules and parameters with those that are known: less
    than a millisecond where there are a thousand of either.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Referred to, so that no new object gets the identity of one that is known.
        self._modules = {id(module): module for module in model.modules()}
        self._parameters = {id(p): p for module in model.modules() for p in own_parameters(module)}

    def look(self) -> None:
        """Warns of the parameters that are new since the last look."""
        if not self._has_new():
            return
        new = dict(self._new())
        self._modules.update({id(module): module for module in self._model.modules()})
        self._parameters.update({id(p): p for p in new.values()})
        if new:
            _LOG.warning(
                "the model got parameters after `wrap`: %s (%s); they stay in memory, which no "
                "budget counts, no optimizer of the session takes them and no commit stores them; "
                "add them before `wrap`",
                listed(list(new)),
                format_size(sum(p.numel() * p.element_size() for p in new.values())),
            )

    def _has_new(self) -> bool:
        owned: list[Iterable[object]] = []
        for module in self._modules.values():
            parameters = dict.values(module._parameters)
            owned += [module._modules.values(), parameters]
        known = {id(None), *self._modules, *self._parameters}
        return not known.issuperset(map(id, itertools.chain.from_iterable(owned)))

    def _new(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, module in self._model.named_modules():
            for name, parameter in dict.items(module._parameters):
                if parameter is not None and id(parameter) not in self._parameters:
                    yield f"{path}.{name}" if path else name, parameter
