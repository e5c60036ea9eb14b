"""What the update pipeline is asked to carry out."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from offload.layout import Record
from offload.optim.model_state import ParameterUpdate
from offload.optim.record_source import RecordSource
from offload.storage.stalls import StallAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateJob:
    """The updates of one step.

    Attributes:
        source: Gives each touched record once.
        touched: Names of the records that have a parameter in `updates` or `edited`.
        updates: By parameter name.
        edited: Parameters that are the master again.
        kept: Names of records whose state stays in memory after its update, not written.
        stalls: Where waits are added.
        on_updated: Called when the parameters of a record have their new values where they live.
        on_computed: Called with the new parameters of a record, by subgroup, that are stored.
        is_staged: Whether what is written becomes current later. Cached records are left alone.
    """

    source: RecordSource
    touched: frozenset[str]
    updates: Mapping[str, ParameterUpdate]
    edited: frozenset[str]
    kept: Container[str]
    stalls: StallAccount
    on_updated: Callable[[Record], None] = lambda _: None
    on_computed: Callable[[Record, Mapping[str, memoryview]], None] = lambda *_: None
    is_staged: bool = False
