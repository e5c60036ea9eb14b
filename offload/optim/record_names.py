"""Which parameters a stored record holds, for messages."""

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
