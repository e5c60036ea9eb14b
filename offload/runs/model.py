"""Builds the model that a configuration names, for real or as facts only."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.config import ModelConfig
from offload.errors import ConfigError
from offload.runs.gpt import GPT, GPTShape
from offload.runs.user_code import calling_user_code, describe


@contextmanager
def importing_beside(file: Path) -> Iterator[None]:
    """Imports inside look first where the run's `file` lies, as those of a script do."""
    directory = str(file.absolute().parent)
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        if directory in sys.path:  # which is the user's code's too
            sys.path.remove(directory)


def build_model(config: ModelConfig) -> nn.Module:
    """Returns a new module whose call `model(inputs, targets)` gives the loss.

    Raises:
        ConfigError: The factory can't be imported or did not return a module.
        ModelError: It, or its module, raised an exception.
    """
    if config.factory is None:
        return GPT(gpt_shape(config))
    factory, arguments = _find_factory(config.factory), config.factory_arguments()
    _require_accepted(config.factory, factory, arguments)
    with calling_user_code(f"`model.factory` `{config.factory}`"):
        model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"cannot use the model of `model.factory` `{config.factory}`: expected a "
            f"torch.nn.Module, found {type(model).__name__}; return a module from it"
        )
    return model


def build_meta_model(config: ModelConfig) -> nn.Module:
    """Returns the module on the meta device: names, shapes and dtypes, no values, no memory."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return build_model(config)


def gpt_shape(config: ModelConfig) -> GPTShape:
    """Returns the sizes of the GPT that `config` describes."""
    return GPTShape(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        context=config.context,
        vocabulary=config.vocabulary,
        dtype=getattr(torch, config.dtype),
    )


def _require_accepted(name: str, factory: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Refuses `model.*` keys that the factory does not take."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # a callable that tells nothing of itself
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"cannot call `model.factory` `{name}` with the keys under `model`: expected "
            f"`{name.partition(':')[2]}{signature}`, found {sorted(arguments)}: {error}; correct "
            "the key"
        ) from error


def _find_factory(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    with calling_user_code(f"the import of `model.factory` `{name}`"):
        try:
            found: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"cannot find `model.factory` `{name}`: expected `module:callable` that can be "
                f"imported, found {describe(error)}; correct it, put the module beside the "
                "run's TOML file, or set PYTHONPATH"
            ) from error
    if not callable(found):
        raise ConfigError(
            f"cannot call `model.factory` `{name}`: expected a callable, "
            f"found {type(found).__name__}; name a class or a function"
        )
    factory: Callable[..., Any] = found
    return factory
