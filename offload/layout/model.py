"""The layout of a whole model: its units, flat shards, subgroups and records."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from offload.errors import ConfigError, StoreError
from offload.layout.codec import WHOLE_RULE
from offload.layout.parameters import ParameterFacts, UnitFacts
from offload.layout.records import Record, Subgroup, gather_records, split_shard
from offload.layout.units import FlatShard, PlacedParameter, Unit, lay_out_unit

RECORD_ELEMENTS = 1 << 20
"""Elements of a record: 12 MiB of state and parameters under `split`. Large enough for full
transfer rates, small enough for a dozen in a window of some hundred MiB."""
MOST_RECORDS = 1 << 20
"""Of a model: 1.1e12 parameters, with records of the usual size. To plan more takes minutes."""


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """Where every parameter and its optimizer state lie. Pure data, equal for equal facts."""

    units: tuple[Unit, ...]
    codec: str
    record_elements: int
    rule: str = "adamw"
    """The update rule of all parameters but those in `whole`."""
    whole: frozenset[str] = frozenset()
    """Parameters that are updated as whole matrices."""

    @cached_property
    def shards(self) -> dict[str, FlatShard]:
        return {shard.name: shard for unit in self.units for shard in unit.shards}

    @cached_property
    def subgroups(self) -> dict[str, tuple[Subgroup, ...]]:
        """The subgroups of each flat shard, frozen ones too, by shard name."""
        return {
            name: split_shard(
                shard,
                subgroup_elements=self.record_elements,
                whole=self.whole if shard.is_trainable else frozenset(),
            )
            for name, shard in self.shards.items()
        }

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """The records of optimizer state, in the order of the units."""
        trainable = [
            (subgroup, shard.dtype)
            for shard in self.shards.values()
            if shard.is_trainable
            for subgroup in self.subgroups[shard.name]
        ]
        return gather_records(
            trainable, codec=self.codec, rule=self.rule, record_elements=self.record_elements
        )

    @cached_property
    def parameters(self) -> dict[str, tuple[FlatShard, PlacedParameter]]:
        """Every parameter by name, in code-point order of names."""
        placed = {
            parameter.facts.name: (shard, parameter)
            for shard in self.shards.values()
            for parameter in shard.parameters
        }
        return dict(sorted(placed.items()))

    @property
    def num_parameters(self) -> int:
        return sum(placed.facts.num_elements for _, placed in self.parameters.values())

    @cached_property
    def trainable_elements(self) -> int:
        """P of the traffic formula: elements of trainable flat shards, gaps included."""
        return sum(s.num_elements for s in self.shards.values() if s.is_trainable)

    @property
    def usual_dtype(self) -> str:
        """The dtype of most trainable shards, whose updates stand for all; bf16 where none is."""
        dtypes = [shard.dtype for shard in self.shards.values() if shard.is_trainable]
        return max(dtypes, key=dtypes.count, default="bfloat16")

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state, alignment included."""
        return sum(record.padded_bytes for record in self.records)

    @property
    def parameter_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self.units)

    def rule_of(self, name: str) -> str:
        """Returns the update rule of the parameter called `name`."""
        return WHOLE_RULE if name in self.whole else self.rule

    def parameters_in(self, subgroup: Subgroup) -> tuple[PlacedParameter, ...]:
        """Returns the parameters that overlap `subgroup`, one of this layout, in their order."""
        found = self._parameters_in.get(subgroup.name)
        if found is None:  # every update asks again
            found = self._parameters_in[subgroup.name] = tuple(
                placed
                for placed in self.shards[subgroup.shard].parameters
                if placed.start < subgroup.stop and subgroup.start < placed.stop
            )
        return found

    @cached_property
    def _parameters_in(self) -> dict[str, tuple[PlacedParameter, ...]]:
        return {}

    def to_json(self) -> dict[str, Any]:
        """Returns the layout as JSON values; `from_json` gives an equal one."""
        return {
            "codec": self.codec,
            "rule": self.rule,
            "whole": sorted(self.whole),
            "record_elements": self.record_elements,
            "units": [
                {
                    "name": unit.name,
                    "parameters": [
                        {
                            "name": p.facts.name,
                            "aliases": list(p.facts.aliases),
                            "shape": list(p.facts.shape),
                            "dtype": p.facts.dtype,
                            "trainable": p.facts.is_trainable,
                        }
                        for p in unit.parameters()
                    ],
                }
                for unit in self.units
            ],
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> "ModelLayout":
        """Returns the layout that `to_json` described.

        Raises:
            StoreError: A key is missing or has another type.
        """
        try:
            units = [
                UnitFacts(
                    name=str(unit["name"]),
                    parameters=tuple(
                        ParameterFacts(
                            name=str(p["name"]),
                            aliases=tuple(map(str, p["aliases"])),
                            shape=tuple(map(int, p["shape"])),
                            dtype=str(p["dtype"]),
                            is_trainable=bool(p["trainable"]),
                        )
                        for p in unit["parameters"]
                    ),
                )
                for unit in value["units"]
            ]
            layout = build_layout(
                units,
                codec=str(value["codec"]),
                record_elements=int(value["record_elements"]),
                rule=str(value["rule"]),
                whole=frozenset(map(str, value["whole"])),
            )
            _ = layout.records  # an unknown codec or dtype shows here
            return layout
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"cannot read the model layout of a manifest: {type(error).__name__}: {error}; "
                "the store was written by another version or is damaged: run `offload verify`"
            ) from error


def build_layout(
    units: Sequence[UnitFacts],
    *,
    codec: str,
    record_elements: int = RECORD_ELEMENTS,
    rule: str = "adamw",
    whole: frozenset[str] = frozenset(),
) -> ModelLayout:
    """Returns the layout of a model whose units are `units`, in that order.

    Args:
        codec: How the optimizer state is encoded.
        record_elements: Elements of a subgroup and of a record, at most about.
        rule: The update rule.
        whole: Parameters that are updated as whole matrices instead.

    Raises:
        ConfigError: It has more than `MOST_RECORDS` records.
    """
    layout = ModelLayout(
        units=tuple(lay_out_unit(unit, whole=whole) for unit in units),
        codec=codec,
        record_elements=record_elements,
        rule=rule,
        whole=whole,
    )
    _require_moderate(layout)
    return layout


def _require_moderate(layout: ModelLayout) -> None:
    elements = sum(shard.num_elements for shard in layout.shards.values())
    if elements > MOST_RECORDS * layout.record_elements:
        raise ConfigError(
            f"cannot lay out a model of {elements} parameters: expected at most "
            f"{MOST_RECORDS * layout.record_elements}, {MOST_RECORDS} records of "
            f"{layout.record_elements}; make the model smaller"
        )
