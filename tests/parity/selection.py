"""Which of many combinations of parameters run, so that each pair of their values does."""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence


def covering_pairs(cases: Sequence[Mapping[str, Hashable]], given: Iterable[int] = ()) -> set[int]:
    """Returns places in `cases` that together have each value and each pair of values of them all.

    Args:
        cases: Values by parameter.
        given: Places that are among them anyway.
    """
    shown = [_values_and_pairs(case) for case in cases]
    chosen = set(given)
    missing = set().union(*shown).difference(*(shown[at] for at in chosen))
    while missing:
        best = max(range(len(cases)), key=lambda at: len(shown[at] & missing))
        chosen.add(best)
        missing -= shown[best]
    return chosen


def _values_and_pairs(case: Mapping[str, Hashable]) -> set[tuple[object, ...]]:
    values = sorted(case.items())
    return {*itertools.combinations(values, 1), *itertools.combinations(values, 2)}
