"""Which stored records an update and a commit write, and how large they are."""

from collections.abc import Container, Iterator

from offload.layout import ModelLayout, Record
from offload.optim.pipeline import ModelState, parameter_key, state_key

_Sizes = dict[str, int]


def written_until_commit(state: ModelState, *, commits: bool) -> list[_Sizes]:
    """Returns bytes by stored record, for each record, of what one step writes at most.

    Args:
        state: Where the model's parameters and optimizer state live.
        commits: Whether a commit may follow, which writes what is resident too.
    """
    groups = []
    for record in state.layout.records:
        sizes: _Sizes = {}
        if commits or state.records is None:
            sizes.update(_state_size(record))
        if commits or state.parameters is None:
            sizes.update(_parameter_sizes(record))
        groups.append(sizes)
    return groups


def written_by_commit(layout: ModelLayout, dirty: Container[str]) -> list[_Sizes]:
    """Returns bytes by stored record, for each record, of what is `dirty`."""
    groups = []
    for record in layout.records:
        sizes = [*_state_size(record), *_parameter_sizes(record)]
        groups.append({key: size for key, size in sizes if key in dirty})
    return groups


def _state_size(record: Record) -> Iterator[tuple[str, int]]:
    if record.num_bytes:
        yield state_key(record), record.num_bytes


def _parameter_sizes(record: Record) -> Iterator[tuple[str, int]]:
    for subgroup in record.subgroups:
        yield parameter_key(subgroup), subgroup.parameter_bytes
