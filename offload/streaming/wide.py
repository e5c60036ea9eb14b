"""Parameters that calls can use in pieces: of linear layers by tiles, of embeddings by rows."""

from collections.abc import Container, Iterator

from torch import nn

from offload.plan.tiles import LARGEST_ROW_BYTES, LEAST_SLOT_BYTES
from offload.streaming.unit_modules import own_parameters


def wide_candidates(model: nn.Module, *, besides: Container[str] = ()) -> list[str]:
    """Returns the names of parameters that could be computed in pieces, the largest first.

    Each module that owns one has to be a linear layer or an embedding with torch's own `forward`.

    Args:
        model: Whose parameters.
        besides: Names that are left out.
    """
    sizes: dict[str, int] = {}
    refused: set[int] = set()
    names: dict[int, list[str]] = {}
    for path, name, module, parameter in _owned(model):
        names.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
        if not is_divisible(module, parameter):
            refused.add(id(parameter))
    for _, _, _, parameter in _owned(model):
        name = min(names[id(parameter)])
        if id(parameter) not in refused and name not in besides:
            sizes[name] = parameter.numel() * parameter.element_size()
    return sorted(sizes, key=lambda name: (-sizes[name], name))


def is_divisible(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Tells whether calls of `module` can use `parameter` in pieces."""
    if "forward" in module.__dict__ or dict.get(module._parameters, "weight") is not parameter:
        return False
    if isinstance(module, nn.Linear):
        is_known = type(module).forward is nn.Linear.forward
    elif isinstance(module, nn.Embedding):
        is_known = type(module).forward is nn.Embedding.forward and module.max_norm is None
    else:
        return False
    num_bytes = parameter.numel() * parameter.element_size()
    return (
        is_known
        and parameter.dim() == 2
        and parameter.is_floating_point()
        and num_bytes > LEAST_SLOT_BYTES
        and parameter.shape[1] * parameter.element_size() <= LARGEST_ROW_BYTES
    )


def _owned(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, nn.Parameter]]:
    for path, module in model.named_modules(remove_duplicate=False):
        mine = {id(parameter) for parameter in own_parameters(module)}
        for name, parameter in dict.items(module._parameters):
            if parameter is not None and id(parameter) in mine:
                yield path, name, module, parameter
