"""What a run asks of a model of the user's: `forward(inputs, targets)` gives the loss."""

import inspect

from torch import Tensor, nn

from offload.errors import ConfigError
from offload.runs.rehearsal import RehearsedModel

_CONTRACT = (
    "a module with `forward(inputs, targets)`, two int64 tensors of shape (train.batch, "
    "model.context), that returns the loss: one number with a gradient"
)


def require_contract(name: str | None, model: RehearsedModel) -> None:
    """Refuses a model of `model.factory` that a run could not call, before anything is written.

    Of a model whose forward needs values only the signature is known then, and `require_loss` has
    the last word.

    Args:
        name: Of the factory; None: the model is one of ours.
        model: Of the run.

    Raises:
        ConfigError: The signature of its forward, or what that returns, is another.
    """
    if name is None:
        return
    _require_signature(name, model.module)
    if not model.needs_values:
        require_loss(name, model.loss)


def require_loss(name: str | None, loss: object, *, is_trained: bool = True) -> Tensor:
    """Returns `loss`, what a model of factory `name` returned, if a run can go on with it.

    Raises:
        ConfigError: It is no tensor of one element, or, where `is_trained`, has no gradient.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not is_trained):
        return loss
    if not isinstance(loss, Tensor):
        found = f"one that returns {type(loss).__name__}"
    elif loss.numel() != 1:
        found = f"one that returns a tensor of shape {tuple(loss.shape)}"
    else:
        found = "one whose loss has no gradient"
    raise _refusal(name, found)


def _require_signature(name: str, model: nn.Module) -> None:
    kind = type(model).__name__
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise _refusal(name, f"`{kind}` without a `forward`")
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a callable that tells nothing of itself
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise _refusal(name, f"`{kind}.forward{signature}`: {error}") from error


def _refusal(name: str | None, found: str) -> ConfigError:
    return ConfigError(
        f"cannot train the model of `model.factory` `{name}`: expected {_CONTRACT}, found "
        f"{found}; correct the model, or return one from the factory that wraps it"
    )
