"""The layout of a wrapped model: as it is asked for, or as the resumed store has it."""

from pathlib import Path

from offload.errors import ConfigError, StoreError
from offload.layout import ModelLayout, build_layout
from offload.streaming.discovery import DiscoveredModel, whole_matrices
from offload.streaming.wrap_options import WrapOptions


def lay_out(
    discovered: DiscoveredModel,
    options: WrapOptions,
    *,
    stored: ModelLayout | None,
    record_elements: int,
) -> ModelLayout:
    """Returns the layout of a model.

    Args:
        discovered: Its units.
        options: How it is wrapped.
        stored: Of the commit that is resumed.
        record_elements: Of a record, at most about.
    """
    rule, whole = options.rule, whole_matrices(discovered, options.matrices)
    if stored is not None:  # whatever optimizer comes, its state is there
        rule, whole = stored.rule, stored.whole
    return build_layout(
        [unit.facts for unit in discovered.units],
        codec=options.codec,
        rule=rule,
        whole=whole,
        record_elements=record_elements,
    )


def require_same(stored: ModelLayout, layout: ModelLayout, *, root: Path) -> None:
    """Raises StoreError unless `stored`, in the store at `root`, is the layout of the model."""
    if stored != layout:
        raise StoreError(
            f"cannot resume from store `{root}`: expected the model that it "
            f"holds ({stored.num_parameters} parameters in {len(stored.units)} units, codec "
            f"`{stored.codec}`), found another ({layout.num_parameters} in "
            f"{len(layout.units)} units, codec `{layout.codec}`); build the same "
            "model, or use another store"
        )


def require_wholeness(layout: ModelLayout, *, takes_whole: bool) -> None:
    """Raises ConfigError unless matrices are laid out apart just where the optimizer takes them."""
    if takes_whole != bool(layout.whole):
        remedy = (
            'make the session with `optimizer="muon"`, for a model with matrices in elements of '
            "module lists, where `optimizer.matrices` names them"
            if takes_whole
            else 'make the session without `optimizer="muon"`'
        )
        raise ConfigError(
            f"cannot make an optimizer that updates {'whole' if takes_whole else 'no whole'} "
            f"matrices: found {len(layout.whole)} of them laid out apart; {remedy}"
        )
