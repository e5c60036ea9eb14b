"""Which parameters are those of an open session: a second one would move them again."""

import weakref
from collections.abc import Iterable

from torch import nn

from offload.errors import ConfigError, StoreError
from offload.streaming.unit_modules import own_parameters

_taken: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""By id."""


def take(parameters: Iterable[nn.Parameter]) -> None:
    """Notes parameters that a session has wrapped."""
    _taken.update({id(each): each for each in parameters})


def give_up(parameters: Iterable[nn.Parameter]) -> None:
    """Undoes `take`; again does nothing."""
    for each in parameters:
        _taken.pop(id(each), None)


def require_free(model: nn.Module) -> None:
    """Checks that no session has the parameters of `model`, and that they can be wrapped.

    Raises:
        StoreError: A session that is open has one.
        ConfigError: One was made in inference mode.
    """
    for name, module in model.named_modules():
        for parameter in own_parameters(module):
            if _taken.get(id(parameter)) is parameter:
                raise StoreError(
                    f"cannot wrap module `{name}`: expected parameters that no session has, found "
                    "one of a model, or an optimizer, of a session that is open; close that "
                    "session, or build another model"
                )
            if parameter.is_inference():
                raise ConfigError(
                    f"cannot wrap module `{name}`: expected parameters that count their changes, "
                    "found one that was made in inference mode; build the model outside "
                    "`torch.inference_mode()`"
                )
