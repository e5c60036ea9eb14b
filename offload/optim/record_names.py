"""Which parameters a stored record holds, for messages."""

from collections.abc import Sequence

from offload.layout import ModelLayout
from offload.optim.pipeline import parameter_key, state_key


def parameters_by_record(layout: ModelLayout) -> dict[str, str]:
    """Returns the names of the parameters in each stored record, joined by commas."""
    found: dict[str, str] = {}
    for subgroups in layout.subgroups.values():
        for subgroup in subgroups:
            names = [placed.facts.name for placed in layout.parameters_in(subgroup)]
            found[parameter_key(subgroup)] = ", ".join(names)
    for record in layout.records:
        keys = [parameter_key(subgroup) for subgroup in record.subgroups]
        found[state_key(record)] = ", ".join(found[key] for key in keys)
    return found


def describe_record(record: str, layouts: Sequence[ModelLayout]) -> str:
    """Returns what the stored record `record` holds: parameters of one of the models."""
    for layout in layouts:
        names = parameters_by_record(layout).get(record)
        if names:
            return f"parameters {names}"
    return "no parameter of the model" if layouts else "parameters of an unknown model"
