"""Where parameters and optimizer state lie: units, flat shards, subgroups, records. Pure data."""

from offload.layout.codec import (
    CODECS,
    RULES,
    WHOLE_RULE,
    Codec,
    SectionKind,
    section_kinds,
    state_bytes_per_element,
)
from offload.layout.dtypes import DTYPES, DType
from offload.layout.model import RECORD_ELEMENTS, ModelLayout, build_layout
from offload.layout.parameters import ParameterFacts, UnitFacts
from offload.layout.records import Record, Section, Subgroup
from offload.layout.units import (
    PARAMETER_ALIGNMENT,
    TRANSFER_ALIGNMENT,
    FlatShard,
    PlacedParameter,
    Unit,
)

__all__ = [
    "CODECS",
    "DTYPES",
    "PARAMETER_ALIGNMENT",
    "RECORD_ELEMENTS",
    "RULES",
    "TRANSFER_ALIGNMENT",
    "WHOLE_RULE",
    "Codec",
    "DType",
    "FlatShard",
    "ModelLayout",
    "ParameterFacts",
    "PlacedParameter",
    "Record",
    "Section",
    "SectionKind",
    "Subgroup",
    "Unit",
    "UnitFacts",
    "build_layout",
    "section_kinds",
    "state_bytes_per_element",
]
